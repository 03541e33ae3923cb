"""What a slice may be: a folder of ``ext`` whose ``__init__`` has a ``slice_``, one of these.

The core asks every slice, and says what it can say where none answers: a folder that is deleted, or cannot be
imported, takes with it what it added and nothing else. A slice's ``__init__`` imports this module alone, since it is
read whenever a command starts; what a method needs, it imports itself. What slices may use is named in ``api.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    from llamaref.config import Rope
    from numpy.typing import NDArray

    from llamadiff.candidates.name_map import Map
    from llamadiff.candidates.opening import CandidateSpec
    from llamadiff.candidates.pieces import Piece, Unread
    from llamadiff.cli.command import Command
    from llamadiff.engines.model_file import ModelFile, Runnable
    from llamadiff.engines.run_spec import Gate, How, Run
    from llamadiff.judge.compared import Compared
    from llamadiff.judge.fact import Fact
    from llamadiff.judge.lanes import Lane, Source
    from llamadiff.judge.measuring import Judge
    from llamadiff.judge.preflight.checks import Check
    from llamadiff.judge.replay import ShownSums, Sketches
    from llamadiff.judge.study import Bench, Look, Study
    from llamadiff.llamacpp.child import Child
    from llamadiff.llamacpp.doctor import Examined
    from llamadiff.llamacpp.passes import PassCheck
    from llamadiff.llamacpp.request import Request, Settings
    from llamadiff.numerics.metrics import Rows
    from llamadiff.numerics.summing import SumsInHalf
    from llamadiff.report.formats import Format
    from llamadiff.report.tables import Table
    from llamadiff.result.comparison import Comparison
    from llamadiff.result.diagnosis import Diagnosis
    from llamadiff.result.normal import Normal
    from llamadiff.result.oddity import CheckpointTokenizer, Oddity
    from llamadiff.system.progress import Progress
    from llamadiff.system.started import Process
    from llamadiff.trace.reader import Trace
    from llamadiff.verbs.by_original import Original
    from llamadiff.verbs.verbs import Compare

    Array = NDArray[Any]
    StartElsewhere = Callable[..., Process]

Answer = TypeVar("Answer")


class Slice:
    """One capability beside the core; it overrides what it adds."""

    needs: Sequence[str] = ()  # other slices, without which this one is missing
    library = ""  # ``module:name`` of what loads a build of llama.cpp, in the process that runs it
    listener = ""  # ``module:name`` of what tells of the inputs of llama.cpp's passes (llamacpp/passes.py)
    adapter = ""  # and of what applies an adapter to a context there (llamacpp/session.py)
    placing = ""  # and of what says where layers are (llamacpp/session.py)
    pytest_plugin = ""  # the module that pytest loads beside ``pytest_plugin.py``
    node_arithmetics = ""  # ``module:name`` of how nodes of a run are computed again (ext/graph/node_checker.py)
    variant = ""  # and of a way of llama.cpp's that is run by itself (ext/state/variation.py: OwnWay)
    recorder = ""  # ``module:name`` of what records a PyTorch model (torch.py)
    remote: Sequence[str] = ()  # modules that are sent where llama.cpp runs and nothing is installed
    remote_files: Sequence[str] = ()  # and other files, from the root

    def commands(self) -> Sequence[Command]:
        """Commands of the command line."""
        return ()

    def sources(self) -> Sequence[str]:
        """Modules of kinds of candidates (``candidates/opening.py``, Source), which are asked before the core's."""
        return ()

    def mistake(self, given: str | Path | Sequence[str], place: str) -> str | None:
        """What is wrong with what was given as a model, trace, candidate or prompt, or as the names of taps."""
        return None

    def misuse(self, command: Any, given: Mapping[str, Any]) -> str | None:
        """What is wrong with the values of a command line that was understood, by their parameters' names."""
        return None

    def usage(self, error: Exception, commands: Mapping[str, Any], words: Sequence[str]) -> str | None:
        """What is wrong with the words of a command line that was not understood; ``commands`` by their names."""
        return None

    def comparison_of(self, candidate: CandidateSpec | None, how: How, run: Run) -> Compare | None:
        """What compares otherwise than with all of a trace of the same run: a file, steps, a server; some rows."""
        return None

    def some_rows(self, model: Runnable, baseline: Trace, candidate: Trace | None) -> SomeRows | None:
        """How a trace of some rows of a prompt is judged. Raises UserError for one that cannot be."""
        return None

    def original(self, candidate: CandidateSpec, model: Runnable, progress: Progress) -> Original | None:
        """The checkpoint whose weights a candidate multiplied by in place of the file's."""
        return None

    def adapter_of(self, trace: Trace, model: Path) -> tuple[str, float] | None:
        """The file and the scale of the adapter that a trace states. Raises UserError where it cannot be found."""
        return None

    def tokenizer(self, folder: Path) -> CheckpointTokenizer | None:
        """The tokenizer of a checkpoint's folder, or of another file, to be compared with a file's."""
        return None

    def half_sums(self) -> SumsInHalf | None:
        """What follows sums that are kept in float16 (``numerics/summing.py``)."""
        return None

    def sketches(self, judge: Judge, products: Mapping[str, str]) -> Sketches | None:
        """What sees that products are right without computing them (``judge/replay.py``)."""
        return None

    def sum_order_probe(self, judge: Judge) -> ShownSums | None:
        """What sees in which way a candidate adds so (``judge/replay.py``)."""
        return None

    def own_graph(self) -> OwnGraph | None:
        """What reads llama.cpp's own graph: an engine of any architecture, whose nodes are judged."""
        return None

    def runner(self) -> StartElsewhere | None:
        """What starts llama.cpp's process by a runner's words."""
        return None

    def ops(self) -> Sequence[str]:
        """Modules of ops of ggml that are not in ``ext/graph/ops``."""
        return ()

    def ops_of(self, folder: Path) -> Iterable[str] | None:
        """The ops that a build's headers name. Raises UserError where there are none."""
        return None

    def map_by_values(
        self, pieces: Sequence[Piece | Unread], model: Runnable, tokens: tuple[int, ...]
    ) -> tuple[Map, list[str]] | None:
        """The map of a candidate's names that their values show, and its lines."""
        return None

    def weight_check(self) -> Callable[[ModelFile, str, Array], str | None] | None:
        """What says in words what is wrong with a dumped weight."""
        return None

    def not_finite(self, model: ModelFile, weight: str | None, layer: int | None) -> Oddity | None:
        """What of a file makes an op's values NaN or Inf on finite inputs: its weight, or what its layer reads."""
        return None

    def concerns(self, model: ModelFile) -> Iterable[str]:
        """What is odd about a file as far as a second tells: a line each, with the command that says more."""
        return ()

    def facts(
        self, seen: Compared, source: Source, lane: Lane, limit: float, rope: Rope | None, dim: int | None
    ) -> tuple[Fact, ...] | None:
        """What the errors of a source's tap look like against what a lane computed (``judge/measuring.py``)."""
        return None

    def chat_template(self) -> Callable[[ModelFile, str], str] | None:
        """What puts a prompt through a model's own template; it raises UserError for one that says nothing."""
        return None

    def looks(self) -> Sequence[Look]:
        """Ways to see in what was found how an engine computes in its own way (``judge/study.py``)."""
        return ()

    def causes(self, bench: Bench, study: Study) -> tuple[Diagnosis, ...] | None:
        """Why taps are wrong, in graph order; None: another slice may know."""
        return None

    def read_span(self, case: Any, sure: bool) -> tuple[Fact, ...] | None:
        """What a span's ops did, where an engine knows more than was recorded; ``sure``: that it is wrong is known."""
        return None

    def other_file(self, bench: Bench, study: Study, given: Trace) -> Check | None:
        """That a trace is of other weights than the file's. Raises UserError for one of another model."""
        return None

    def hold_to_gate(self, result: Comparison, bench: Bench, study: Study, gate: Gate) -> Comparison | None:
        """A result whose logits are held to limits; it is given for traces that are checked."""
        return None

    def record_anew(self, traces: Sequence[Path], model: Path | None, force: bool) -> str | None:
        """Record captures anew, and say what changed -> the worst verdict of what was recorded (``check --update``)."""
        return None

    def pass_check(self) -> PassCheck | None:
        """What holds the inputs of llama.cpp's passes against what was run before."""
        return None

    def formats(self) -> Sequence[Format]:
        """Formats that a report can be written in."""
        return ()

    def closeup(self, recorded: Rows, right: Rows, axes: Sequence[str], index: Sequence[int]) -> object:
        """What a format shows of a tensor against what is right, around the worst place."""
        return None

    def add_to(self, result: Comparison) -> Comparison:
        """A result, with what the slice says of it, in its proof or in ``Comparison.more``."""
        return result

    def normal(self, result: Comparison) -> Normal | None:
        """Whether the layers' outputs are the model's own, or the code's."""
        return None

    def tables(self, result: Comparison, full: bool) -> Sequence[Table]:
        """Tables that a report shows of what the slice keeps in ``Comparison.more``."""
        return ()


@dataclass(frozen=True)
class SomeRows:
    """An engine that runs some rows, both sides with these alone; and what says of tokens what is said of rows."""

    model: Runnable
    baseline: Trace
    candidate: Trace | None
    of_tokens: Callable[[Comparison], Comparison]


class OwnGraph(Protocol):
    """What reads llama.cpp's graph. Each method raises UserError for whatever a user can mend."""

    def run(self, model: Path, request: Request, progress: Progress, child: Child | None) -> tuple[Runnable, Trace]:
        """Run llama.cpp: the model with the graph of all tokens in one go, and the trace that was asked for."""

    def of_run(
        self, model: ModelFile, trace: Trace, progress: Progress, place: Settings | None, child: Child | None
    ) -> Runnable | None:
        """The model with the graph of a trace's tokens, kept in it or asked for now; None where it cannot be had."""

    def capture(self, request: Request, progress: Progress, child: Child | None) -> Trace:
        """Run llama.cpp, and keep its graph in the trace."""

    def judge_nodes(self, model: ModelFile, request: Request, how: How, child: Child | None) -> Comparison:
        """Run llama.cpp, and judge every node on the inputs that it was given."""

    def record_nodes(self, request: Request, progress: Progress) -> int:
        """Run llama.cpp, and record its nodes without judging them -> how many there are."""

    def examine_ops(self, ops: Iterable[str]) -> Examined:
        """What a doctor says of ggml's ops, by their names: how many are judged."""


@dataclass(frozen=True)
class Missing:
    """A folder of ``ext`` that cannot be imported, and why."""

    name: str
    reason: str


@cache
def load() -> tuple[Mapping[str, Slice], tuple[Missing, ...]]:
    """The slices by their names, and what is missing."""
    slices, missing = dict[str, Slice](), list[Missing]()
    for name in sorted(each.name for each in iter_modules(import_module("llamadiff.ext").__path__) if each.ispkg):
        try:
            slices[name] = import_module(f"llamadiff.ext.{name}").slice_
        except Exception as error:  # whatever is wrong with one, the others run
            missing.append(Missing(name, f"{type(error).__name__}: {error}"))
    while lacking := {name: need for name, slice_ in slices.items() for need in slice_.needs if need not in slices}:
        for name, need in lacking.items():
            del slices[name]
            missing.append(Missing(name, f"needs {need}, which is missing"))
    return slices, tuple(missing)


def slices() -> Mapping[str, Slice]:
    """Those that are there, by their names."""
    return load()[0]


def missing_slices() -> tuple[Missing, ...]:
    """Those that are not, and why."""
    return load()[1]


def ask_all(question: Callable[[Slice], Answer]) -> Iterator[Answer]:
    """What the slices answer, those left out that answer nothing."""
    yield from (answer for slice_ in slices().values() if (answer := question(slice_)))


def ask_first(question: Callable[[Slice], Answer | None]) -> Answer | None:
    """What the first slice answers that answers something; None if none does."""
    return next(ask_all(question), None)
