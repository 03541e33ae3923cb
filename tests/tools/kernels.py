"""How near this machine's llama.cpp is to NumPy: the worst of each op over small models. ``make builds``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from models.options import OPTIONS  # noqa: E402
from models.small import write_model  # noqa: E402
from sent import own_rounding  # noqa: E402

from llamadiff.ext.graph.check import NodeCheck  # noqa: E402
from llamadiff.ext.graph.readers import check_nodes  # noqa: E402
from llamadiff.llamacpp.capture import probe  # noqa: E402
from llamadiff.llamacpp.request import Request, Settings  # noqa: E402
from llamadiff.numerics import tolerances  # noqa: E402

TOKENS = (1, 5, 9, 30, 17, 22)
MODELS = ("llama", "moe", "gpt2", "gpt-oss", "mamba2")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")


def runs(folder: Path) -> Iterator[tuple[NodeCheck, ...]]:
    """Every node of every model, with and without flash attention."""
    for name in MODELS:
        for kind in KINDS:
            path = write_model(folder / f"{name}.{kind}.gguf", kind=kind, **OPTIONS[name])
            for settings in (Settings(), Settings(flash_attn=True)):
                request = Request(str(path), tokens=TOKENS, n_predict=2, output=str(folder / "n.json"), nodes=True,
                                  settings=settings)  # fmt: skip
                yield check_nodes(request).checks


def worst_by_op(checks: Iterator[tuple[NodeCheck, ...]]) -> dict[str, tuple[float, float]]:
    """Op, and type of weights -> the worst NMSE, and the largest part of its limit."""
    worst: dict[str, tuple[float, float]] = {}
    for check in (check for run in checks for check in run if check.nmse):
        limit = tolerances.rule_for(tolerances.RULES, check.name, check.op, "F32").match + check.rounding
        key = f"{check.op} {check.weight_type or ''}".strip()
        nmse, part = worst.get(key, (0.0, 0.0))
        worst[key] = max(nmse, check.nmse), max(part, check.nmse / limit)
    return worst


def main() -> None:
    print(f"{probe().build}\nrounds to eight bits as {own_rounding().way or 'AVX'} does\n")
    print("| op | worst NMSE | of its limit |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for op, (nmse, part) in sorted(worst_by_op(runs(Path(folder))).items()):
            print(f"| {op} | {nmse:.1e} | {part:.1%} |")


if __name__ == "__main__":
    main()
