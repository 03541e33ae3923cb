"""A program's graphs, node by node: one Comparison for each part of a model that it computes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from llamadiff.engines.run_spec import USUAL, How
from llamadiff.engines.select import GRAPH, EngineUsed
from llamadiff.ext.graph.backend import OPS, rows_of, summarize, worst_rows
from llamadiff.ext.watch.watch_run import Bounds
from llamadiff.ext.watch.watching import JudgedGraph, Watched
from llamadiff.ext.watch.watching import watch as run_watched
from llamadiff.judge.verdict import WRONG, of_run, of_unjudged, worst_of
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.result.comparison import Comparison, Judged, Sides, assemble
from llamadiff.result.message import Message
from llamadiff.result.rows import Row
from llamadiff.system.errors import UserError
from llamadiff.system.output import made_directory
from llamadiff.system.python_child import how_it_ended, peak_rss_mb

LINKED = (
    "no graph of ggml's was seen: this program computes none, or has ggml linked into itself, where nothing can be put "
    "before it; build it with -DBUILD_SHARED_LIBS=ON"
)


@dataclass(frozen=True)
class ProgramWatched:
    """A Comparison for each kind of graph, by its name; what is said of the run besides; how the program ended."""

    graphs: tuple[tuple[Path, Comparison], ...]
    said: tuple[str, ...]
    ended: str
    verdict: str


@dataclass
class _Kind:
    """The graphs of one name so far."""

    ggml: str
    rows: tuple[Row, ...] = ()
    passes: int = 0
    nodes: int = 0
    on_device: bool = False
    fed: frozenset[str] = frozenset()
    is_inserted: bool = False


def watch_program(
    arguments: Sequence[str], bounds: Bounds, how: How = USUAL, keep: Path | None = None,
    settings: Settings | None = None,
) -> ProgramWatched:  # fmt: skip
    """Run a program and judge every node of the graphs that ``bounds`` says.

    ``keep``: a directory for wrong ops, with their inputs; ``settings``: their runner starts the Python that runs the
    program. Raises UserError, for other settings too: how ggml is used is the program's own.
    """
    place = settings or Settings(runner="")
    if place != Settings(runner=place.runner):
        raise UserError("watch: of --llama-cpp it takes runner=CMD alone; all else is said to the program itself")
    kinds: dict[str, _Kind] = {}

    def tell(graph: JudgedGraph) -> None:
        kind = kinds.setdefault(graph.name, _Kind(graph.ggml.version))
        kind.rows = worst_rows([*kind.rows, *rows_of([replace(check, step=0) for check in graph.checks], how.rules)])
        kind.passes, kind.nodes = kind.passes + 1, kind.nodes + len(graph.checks)
        kind.fed |= {*graph.fed}
        kind.is_inserted = kind.is_inserted or graph.is_inserted
        kind.on_device = kind.on_device or graph.on_device

    request = Request("", nodes=True, pictures=how.pictures, settings=place)
    with made_directory(keep) if keep is not None else nullcontext(None) as folder:
        found = run_watched(arguments, bounds, replace(request, keep=folder), tell, how.progress)
    name, ended = Path(arguments[0]).name, _ended(found)
    if not found.judged:
        raise UserError(_nothing(found, name, ended))
    graphs = tuple((Path(part), _comparison(name, part, kind, found, keep)) for part, kind in kinds.items())
    verdict = worst_of([result.verdict for _, result in graphs])
    return ProgramWatched(graphs, tuple(_said(found, kinds)), ended, verdict)


def _ended(found: Watched) -> str:
    """How a program failed; empty if it did not."""
    if found.code is None:
        return found.why
    return how_it_ended(found.code) if found.code else ""


def _nothing(found: Watched, name: str, ended: str) -> str:
    """Why no graph was judged."""
    why = f" ({name} {ended})" if ended else ""
    if not found.seen:
        return LINKED + why
    if found.refused:
        return f"{Path(found.refused[0].path).name}: its tensors cannot be read: {found.refused[0].refused}{why}"
    if found.failed == found.seen:
        return (
            f"none of {found.seen} graphs could be written down: the disk is full, or this ggml runs no node alone{why}"
        )
    return f"none of {found.seen} graphs was judged; see --graphs, --first and --every{why}"


def _comparison(name: str, part: str, kind: _Kind, found: Watched, keep: Path | None) -> Comparison:
    ruling = of_run([row.verdict for row in kind.rows] or [of_unjudged()])
    whose = f"{name}'s {part}" if part != "graph" else name
    sides = Sides(
        model={"file": part, "architecture": part}, tokens=(), n_prefill=0,
        baseline={"name": name, "version": f"ggml {kind.ggml}".strip(), "settings": {}}, candidate=OPS, is_engine=True,
    )  # fmt: skip
    timing = {"capture_s": found.seconds, "engine_s": 0.0, "compare_s": 0.0, "total_s": found.seconds,
              "peak_rss_mb": peak_rss_mb()}  # fmt: skip
    judged = Judged(rows=tuple(kind.rows), timing=timing, notes=tuple(_said(found, {part: kind})))
    said = summarize(kind.rows, name, f"{kind.passes} graphs", kind.on_device)
    said = Message(f"{part}: {said.headline}", said.clauses)
    steps = _next_steps(kind.rows, keep, whose)
    return replace(assemble(sides, judged, ruling, said, steps), engine=EngineUsed(GRAPH))


def _said(found: Watched, kinds: dict[str, _Kind]) -> list[str]:
    """What was looked at, what was not, and what that took."""
    passes, nodes = (sum(getattr(kind, name) for kind in kinds.values()) for name in ("passes", "nodes"))
    said = [f"{passes} of {found.seen} graphs were judged, {nodes} nodes in all"]
    if found.put_off:
        said.append(f"{found.put_off} graphs that were due were left out, since as much as may wait was waiting")
    if found.failed:
        said.append(f"{found.failed} graphs could not be written down")
    if found.in_part:
        said.append(f"{found.in_part} nodes were judged by as many of their rows as --max-node has room for")
    if found.large:
        said.append(f"{found.large} nodes were too large to be looked at (--max-node)")
    said += [f"{Path(ggml.path).name}: its tensors cannot be read: {ggml.refused}" for ggml in found.refused]
    if fed := sorted({name for kind in kinds.values() for name in kind.fed}):
        said.append(
            f"what was fed to the encoder ({', '.join(fed)}) was not judged: --keep DIR keeps it, and llamadiff "
            f"preprocess CHECKPOINT FILE --candidate DIR/0-{fed[0]}.npy judges it"
        )
    if any(kind.is_inserted for kind in kinds.values()):
        said.append(
            "where an encoder's rows lie among the text, their positions and mask were not judged: --keep DIR keeps "
            "them, and llamadiff preprocess CHECKPOINT FILE --prompt TEXT --candidate DIR judges them"
        )
    said.append(f"the program ran for {found.seconds:.1f} s, at least {found.slower:.2f} times as long as unwatched")
    return said


def _next_steps(rows: Sequence[Row], keep: Path | None, whose: str) -> tuple[str, ...]:
    if not any(row.verdict == WRONG for row in rows):
        return ()
    if keep is None:
        return ("run llamadiff watch with --keep DIR: it saves each wrong op with its inputs, for a bug report",)
    return (
        f"{keep.name} holds inputs, parameters, expected and actual output of each wrong op of {whose}; llamadiff "
        "replay FILE -o ISSUE.md runs one on any build, and writes what to report",
    )
