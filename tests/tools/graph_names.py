"""Which injected bugs are named, and the list of those that are not.

``graph_names.py [injected|spans|pairs|dumps] [-k TEXT|TEXT] [--kinds F16 Q8_0] [--first] [-v]``: a line for
each case that is not named as it was injected, then how many were run and named, by bug. ``--first``: each bug in its
first model alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from explaining import CASES, TRIALS, Case, Explained, name_of, trouble  # noqa: E402
from models.options import OPTIONS  # noqa: E402
from models.small import write_model  # noqa: E402

from llamadiff.verbs import judging  # noqa: E402


def main() -> int:
    """Run the cases that were asked for; 1 if one is not named."""
    asked = _asked()
    judging.LEAST = asked.work
    run, missed = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:

        def small_model(name: str, kind: str) -> Path:
            path = Path(folder) / f"{name}.{kind}.gguf"
            return path if path.exists() else write_model(path, kind=kind, **OPTIONS[name])

        explained = Explained(small_model)
        for name, cause, trouble_of in _wanted(asked):
            started = time.perf_counter()
            try:
                found = trouble_of(explained)
            except Exception as error:  # the list goes on
                found = f"raises {error!r}"
            run[cause] += 1
            missed[cause] += bool(found)
            if found or asked.v:
                seconds = time.perf_counter() - started
                print(f"{'MISSED ' * bool(found)}{name} [{cause}] {seconds:.1f} s: {found}", flush=True)
    for cause, count in missed.most_common():
        if count:
            print(f"{cause}: {count} of {run[cause]} not named")
    print(f"{run.total()} run, {run.total() - missed.total()} named")
    return 1 if missed.total() else 0


Asked = Callable[[Explained], str]


def _wanted(asked: argparse.Namespace) -> Iterator[tuple[str, str, Asked]]:
    """The name, the cause and the trouble of each case that was asked for."""
    if asked.of != "injected":
        for trial in TRIALS[asked.of]():
            if any(text in trial.name for text in asked.k.split("|")):
                yield trial.name, " + ".join(sorted(trial.causes)), trial.trouble
        return
    for case in CASES:
        injection, model, kind = case
        wanted = any(text in injection.name or text == injection.cause for text in asked.k.split("|"))
        if wanted and kind in asked.kinds and not (asked.first and model != injection.models[0]):
            yield name_of(case), injection.cause, partial(_trouble, case)


def _trouble(case: Case, explained: Explained) -> str:
    return trouble(case[0], explained.compared(case))


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", nargs="?", default="injected", choices=("injected", *TRIALS))
    parser.add_argument("-k", default="")
    parser.add_argument("--kinds", nargs="*", default=("F16", "Q8_0"))
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--work", type=float, default=4e10)
    parser.add_argument("-v", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
