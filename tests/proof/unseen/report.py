"""A table of the mistakes of this engine: how many are named in each architecture, and a line for each that is not.

python tests/proof/unseen/report.py [architecture ...] [-k TEXT|TEXT] [--every N] [--from N] [--work N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "reference"), str(ROOT)]

from llamadiff.verbs import judging  # noqa: E402
from proof.unseen.architectures import MODELS  # noqa: E402
from proof.unseen.crossing import Models, Outcome  # noqa: E402

COUNTED = (Outcome.is_at_the_tap, Outcome.is_named, Outcome.is_false)
COLUMNS = "{:<14} {:>5} {:>8} {:>6} {:>6} {:>8}"


def main() -> int:
    """Run what was asked for; 1 if something is not as it was injected."""
    asked = _asked()
    judging.LEAST = asked.work
    lines = [COLUMNS.format("architecture", "run", "at tap", "named", "false", "seconds")]
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))
        for arch in asked.architectures or MODELS:
            started = time.perf_counter()
            outcomes = list(_outcomes(models, arch, asked))
            counts = [sum(map(is_so, outcomes)) for is_so in COUNTED]
            bad += counts[:2] != [len(outcomes)] * 2 or counts[2] > 0
            lines.append(COLUMNS.format(arch, len(outcomes), *counts, f"{time.perf_counter() - started:.0f}"))
    print("\n".join(lines))
    return 1 if bad else 0


def _outcomes(models: Models, arch: str, asked: argparse.Namespace) -> Iterator[Outcome]:
    for case in list(models.cases(arch))[asked.first :: asked.every]:
        if any(text in case.bug.name for text in asked.k.split("|")):
            outcome = models.outcome(case)
            if outcome.trouble:
                print(f"{arch}: {case.bug.name} {sorted(case.bug.others)}: {outcome.trouble}", flush=True)
            yield outcome


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="architecture")
    parser.add_argument("-k", default="")
    parser.add_argument("--every", type=int, default=1, metavar="N")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="N")
    parser.add_argument("--work", type=float, default=1e11)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
