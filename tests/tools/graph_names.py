"""Which injected bugs llama.cpp's graph names, where the reference engine judges: the list of those that it does not.

``graph_names.py [-k TEXT] [--kinds F16 Q8_0] [--taps]``: one line for each case that is not named as it was injected,
then how many were run and named, by bug. ``--taps``: by the bugs of taps, for comparison.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS)]

from conftest import OPTIONS  # noqa: E402
from injected import INJECTIONS  # noqa: E402
from injected.base import TOKENS, Injection  # noqa: E402
from llamaref import Engine  # noqa: E402
from small import write_model  # noqa: E402

from llamadiff.candidates.reference import record  # noqa: E402
from llamadiff.comparison import judging  # noqa: E402
from llamadiff.comparison.result import Comparison  # noqa: E402
from llamadiff.engines.capture_request import text_request  # noqa: E402
from llamadiff.engines.graph_model import GraphModel, by_its_graph  # noqa: E402
from llamadiff.engines.model_file import ModelFile  # noqa: E402
from llamadiff.engines.reference_model import Model  # noqa: E402
from llamadiff.engines.run_spec import USUAL, Run  # noqa: E402
from llamadiff.trace.reader import Trace  # noqa: E402

FOLDER = Path(tempfile.mkdtemp())


@cache
def model_path(name: str, kind: str) -> Path:
    return write_model(FOLDER / f"{name}.{kind}.gguf", kind=kind, **OPTIONS[name])


@cache
def graph_of(name: str, kind: str) -> GraphModel:
    path = model_path(name, kind)
    output = FOLDER / f"{name}.{kind}.safetensors"
    return by_its_graph(path, text_request(ModelFile(path), Run(tokens=TOKENS), output))[0]


@cache
def right_of(name: str, kind: str) -> Trace:
    return record(Engine(model_path(name, kind)), TOKENS, "engine")


def split(trace: Trace, decode: int) -> Trace:
    info = replace(trace.info, n_prefill=len(TOKENS) - decode)
    return Trace(info, {name: trace[name] for name in trace}, trace.dtypes)


def compared(injection: Injection, name: str, kind: str, by_taps: bool) -> Comparison:
    """The comparison of a faulty run with the right one."""
    path = model_path(name, kind)
    sides = (right_of(name, kind), record(injection.build(path), TOKENS, "my engine"))
    baseline, candidate = (split(trace, injection.decode) for trace in sides)
    explainer = None if by_taps else graph_of(name, kind)
    return judging.judge(Model(path), baseline, candidate, USUAL, explainer=explainer)


def trouble(injection: Injection, result: Comparison) -> str:
    """What is not as it was injected; empty if all is."""
    if injection.choice:
        return "" if result.verdict == "match" else result.verdict
    if injection.harmless:
        noise = [row for row in result.rows if row.verdict == "noise"]
        said = {row.explained or row.local.arithmetic for row in noise}
        good = result.verdict == "noise" and said == {injection.says}
        return "" if good else f"{result.verdict}: {sorted(map(str, said))}"
    first = result.first_divergence
    if first is None or not result.diagnosis:
        return "no diagnosis"
    found = result.diagnosis[0]
    causes = [cause.name for cause in found.causes]
    if found.tap != first.tap:
        return f"named at {found.tap}: {causes}"
    if injection.cause not in causes:
        near = [f"{cause.name} {cause.nmse:.1e}" for cause in found.nearest]
        return f"at {found.tap}: {causes or 'unknown'}; nearest {near}; right {max(found.right.values()):.1e}"
    if found.nmse > 1e-9:
        return f"at {found.tap}: left {found.nmse:.1e}"
    rest = {cause.name for other in result.diagnosis[1:] for cause in other.causes} - {injection.cause}
    unknown = [other.tap for other in result.diagnosis[1:] if not other.causes]
    return f"and {rest} too, unknown at {unknown}" if rest or unknown else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="")
    parser.add_argument("--kinds", nargs="*", default=("F16", "Q8_0"))
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--taps", action="store_true")
    parser.add_argument("-v", action="store_true")
    asked = parser.parse_args()
    judging.LEAST_SECONDS = asked.seconds
    run, missed = Counter[str](), Counter[str]()
    for injection in INJECTIONS:
        if not any(text in injection.name or text == injection.cause for text in asked.k.split("|")):
            continue
        for name in injection.models[: 1 if asked.first else None]:
            for kind in injection.kinds:
                if kind not in asked.kinds or (asked.models and name not in asked.models):
                    continue
                started = time.perf_counter()
                try:
                    result = compared(injection, name, kind, asked.taps)
                    found = trouble(injection, result)
                except Exception as error:
                    found, result = f"raises {error!r}", None
                run[injection.cause] += 1
                seconds = time.perf_counter() - started
                if found:
                    missed[injection.cause] += 1
                    print(f"{injection.name} [{injection.cause}] {name} {kind} ({seconds:.1f} s): {found}", flush=True)
                elif asked.v:
                    print(f"{injection.name} {name} {kind} ({seconds:.1f} s): {result.diagnosis and result.diagnosis[0].causes[0].says}", flush=True)
    for cause, count in missed.most_common():
        print(f"{cause}: {count} of {run[cause]}")
    print(f"{run.total()} run, {run.total() - missed.total()} named")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
