"""One line for each run of a stranger: what the judge made of it. Filters are substrings, or `all`.

python tests/proof/strangers/report.py [--arith NAME] [--bug NAME] [--model M] [--kind K] [--shape dense] ...
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "reference"), str(ROOT)]

from proof.injected import BUGS  # noqa: E402
from proof.strangers.arithmetic import ARITHMETICS, Arithmetic  # noqa: E402
from proof.strangers.crossing import (  # noqa: E402
    EVERY_KIND,
    RIGHT_MODELS,
    Case,
    Outcome,
    applies,
    figures,
    figures_of,
    judged,
)
from proof.strangers.lies import drawn, told, untouched  # noqa: E402


def main() -> None:
    """Runs, or lies, and what became of them."""
    options, totals = _options(), Counter[str]()
    if options.lies:
        return _lies(options)
    with tempfile.TemporaryDirectory() as scratch:
        for case in _cases(options):
            started = time.perf_counter()
            outcome = judged(case, Path(scratch), diagnose=not options.plain)
            words = _findings(outcome, not options.plain)
            totals.update(words or ["right" if case.bug is None else "found"])
            if words or not options.quiet:
                print(_line(outcome, words, time.perf_counter() - started), flush=True)
    _print_totals(totals)
    return None


def _print_totals(totals: Counter[str]) -> None:
    print("; ".join(f"{count} {word}" for word, count in totals.items()) or "no such run")


def _lies(options: argparse.Namespace) -> None:
    """Lies from --seed on."""
    totals = Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seed, options.seed + options.lies):
            result = told(drawn(seed), Path(scratch))
            accused = [row.tap for row in untouched(result.lie.setting, Path(scratch)).wrong]
            words = result.line.split(";")[0]
            totals.update([f"{result.lie.setting.precision} {words}", *["ACCUSED"] * bool(accused)])
            if accused or words == "MISSED" or not options.quiet:
                print(result.line, f"ACCUSED {accused[0]}" if accused else "", flush=True)
    _print_totals(totals)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arith", default="all", help="arithmetics whose names hold this; =NAME: this one")
    parser.add_argument("--bug", help="bugs whose names hold this, =NAME, or all; left out: right runs")
    parser.add_argument("--model", default="", help="models, with commas; llama,qwen2,qwen3,moe; a bug's own")
    parser.add_argument("--kind", default="", help="kinds of weights, with commas, or all; F16,Q8_0; a bug's own")
    parser.add_argument("--shape", default="dense", help="dense, sparse or logits, with commas")
    parser.add_argument("--precision", default="f32", help="f32, f16, bf16: what the trace keeps")
    parser.add_argument("--seed", type=int, default=0, help="of the prompt; odd ones record the cache as well")
    parser.add_argument("--length", type=int, default=12, help="tokens")
    parser.add_argument("--decode", type=int, default=0, help="how many of them are decode steps")
    parser.add_argument("--quiet", action="store_true", help="only what is not as it should be")
    parser.add_argument("--once", action="store_true", help="a bug's first model and kind alone")
    parser.add_argument("--lies", type=int, default=0, metavar="N", help="N lies instead (lies.py), from --seed on")
    parser.add_argument("--plain", action="store_true", help="no diagnosis: fast, and no causes")
    return parser.parse_args()


def _fits(name: str, wanted: str) -> bool:
    return wanted == "all" or (name == wanted[1:] if wanted.startswith("=") else wanted in name)


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    bugs = [None] if options.bug is None else [name for name in BUGS if _fits(name, options.bug)]
    for bug in bugs:
        models = options.model.split(",") if options.model else BUGS[bug].models if bug else RIGHT_MODELS
        kinds = options.kind.split(",") if options.kind else BUGS[bug].kinds if bug else ("F16", "Q8_0")
        kinds = EVERY_KIND if options.kind == "all" else kinds
        models, kinds = (models[:1], kinds[:1]) if options.once else (models, kinds)
        for arithmetic in ARITHMETICS:
            if not _fits(arithmetic.name, options.arith):
                continue
            for model in models:
                if _possible(arithmetic, bug, model):
                    for kind in kinds:
                        for shape in options.shape.split(","):
                            yield Case(arithmetic, model, kind, bug, shape, options.seed, options.length,
                                       options.decode, options.precision)  # fmt: skip


def _possible(arithmetic: Arithmetic, bug: str | None, model: str) -> bool:
    return applies(arithmetic, BUGS[bug], model) if bug else not arithmetic.only or model in arithmetic.only


def _findings(outcome: Outcome, named: bool) -> list[str]:
    words = ["ACCUSED"] * (outcome.accused is not None)
    if outcome.case.bug is not None:
        words = words or ["BESIDE"] * bool(outcome.beside)
        words += ["MISSED"] * (outcome.missed is not None) + ["MISNAMED"] * outcome.misnamed
        if not words and outcome.first is None:
            words = ["hidden"]
        elif not words and named and not outcome.causes:
            words = ["unknown"]
    return words


def _line(outcome: Outcome, words: list[str], seconds: float) -> str:
    result, first = outcome.comparison, outcome.first
    parts = [f"{' '.join(words) or 'ok':9} {result.verdict:9} {outcome.case.name}"]
    if first is not None:
        parts.append(f"at {first.tap}{f' [{first.op}]' if first.span else ''}")
        parts.append(f"cause {' or '.join(outcome.causes) or '-'}")
    if outcome.missed:
        size, right = outcome.truth[outcome.missed], outcome.untouched.get(outcome.missed)
        parts.append(f"should be {outcome.missed} with {figures_of(size)}; when right, {figures_of(right)} could hide")
    if outcome.beside and outcome.case.bug is not None:
        parts.append(f"accuses {', '.join(outcome.beside)}")
    if outcome.case.bug is None:
        parts.append(", ".join(figures(outcome)))
    return "; ".join(part for part in parts if part) + f"  ({seconds:.1f} s)"


if __name__ == "__main__":
    main()
