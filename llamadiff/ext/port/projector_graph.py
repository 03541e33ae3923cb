"""llama.cpp's graph of a projector file: what llama-mtmd-cli computes of a picture or a sound, watched node by node."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.graph.graph import VIEWS, Graph, GraphNode, Leaf
from llamadiff.ext.graph.node import Node
from llamadiff.ext.graph.recorder import UNNAMED, GraphRecorder
from llamadiff.ext.port.lineup import INPUT
from llamadiff.ext.port.stand_in import width_of, write_stand_in
from llamadiff.ext.watch.watch_run import Bounds
from llamadiff.ext.watch.watched_graph import ProgramWeights, WatchedGraph
from llamadiff.ext.watch.watched_inputs import FED
from llamadiff.ext.watch.watching import Watched, watch
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.llamacpp.child import last_words
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.llamacpp.sent_tensor import SentTensor
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.system.progress import Progress
from llamadiff.system.python_child import how_it_ended

Array = NDArray[Any]
PROGRAM = "llama-mtmd-cli"
PLACES = ("", "bin", "build/bin", "lib", "bin/Release", "build/bin/Release")  # of programs, in a folder of llama.cpp's
GRAPHS = 16  # that are kept: the text model's are small, and a picture's tiles are one like the other
KEPT = 64  # nodes at the end whose values are kept: a model may end where llama.cpp goes on
LARGEST = 1 << 36  # bytes of a node: none is left out
SENSES = {"image": "vision", "audio": "audio"}  # option -> what a projector file's keys call it
HALVES = ("f16", "bf16")
_WEIGHT = re.compile(r"\.(weight|bias)$")
_LAYERED = re.compile(r"[va]\.blk\.([0-9]{1,4})\.(.+)")
MOST_LOG = 1 << 20  # bytes of what the program said


@dataclass(frozen=True)
class ProjectorRun:
    """``graph`` begins with the node ``fed``, which has the pixels or mel rows.

    ``own``: what llama.cpp's run gave at its last nodes, by number; ``by``: the program and its ggml; ``parts``: how
    many such graphs the program computed, of tiles or chunks.
    """

    graph: Graph
    fed: GraphNode
    own: Mapping[int, Array]
    by: str
    parts: int


def program_of(settings: Settings) -> Path:
    """The llama-mtmd-cli of a folder, or of PATH. Raises UserError where there is none."""
    if settings.runner:
        raise UserError(f"runner={settings.runner}: a projector's graph is asked of a {PROGRAM} on this machine alone")
    if not settings.llama_cpp:
        found = shutil.which(PROGRAM)
        if found is None:
            raise UserError(
                f"{PROGRAM} is not on PATH, and llama-cpp-python has none; give --llama-cpp DIR, a build of llama.cpp"
            )
        return Path(found)
    folder = Path(settings.llama_cpp)
    found = next((str(path) for place in PLACES if (path := folder / place / PROGRAM).is_file()), None)
    if found is None:
        raise UserError(
            f"--llama-cpp {folder}: no {PROGRAM} in it (nor in bin, build/bin); cmake --build DIR --target {PROGRAM}"
        )
    return Path(found).absolute()


def projector_graph(file: ModelFile, sense: str, media: Path, settings: Settings, progress: Progress) -> ProjectorRun:
    """Have llama.cpp look at a picture, or listen to a sound. Raises UserError.

    ``sense`` is the option's name. The program is given a text model that is made for this, of one layer of zeros:
    what that computes of the rows that come is not looked at.
    """
    program = program_of(settings)
    check_regular(media, "a picture or a sound")
    if not media.is_file():
        raise UserError(f"{media}: no such file")
    kept = list[_Kept]()

    def begun(*words: Any) -> _Kept:
        kept.append(_Kept(*words))
        return kept[-1]

    with scratch_directory() as folder, tempfile.TemporaryFile() as log:
        text = write_stand_in(Path(folder) / "text.gguf", width_of(file.weights.fields, SENSES[sense]))
        words = [
            program, "--model", text, "--mmproj", file.path, f"--{sense}", media, "--prompt", "a", "-n", "1",
            "-ngl", "0", "--no-mmproj-offload", "--flash-attn", "off", "--no-warmup", "--chat-template", "vicuna",
            "--threads", settings.threads or min(4, os.cpu_count() or 1),
        ]  # fmt: skip
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        bounds = Bounds(first=GRAPHS, every=0, large=LARGEST)
        request = Request("", nodes=True, settings=Settings(runner=""))
        ended = watch([*map(str, words)], bounds, request, lambda _: None, progress, begun, streams)
        seen = [each for each in kept if each.recorder.fed is not None and each.is_whole]
        if not seen:
            log.seek(max(0, log.seek(0, os.SEEK_END) - MOST_LOG))
            raise UserError(_nothing(program, media, ended, log.read().decode("utf-8", "replace")))
        first = seen[0]
        graph, fed = with_input(first.recorder.graph(file, first.held, first.read))
        version = f"{PROGRAM}, ggml {ended.version}".removesuffix(", ggml ")
        own = {number: tensor.values() for number, tensor in first.recorder.last.items()}
        return ProjectorRun(graph, fed, own, version, len(seen))


def _nothing(program: Path, media: Path, ended: Watched, log: str) -> str:
    """Why no graph of an encoder was seen."""
    refused = next((ggml for ggml in ended.refused), None)
    if refused is not None:
        return f"{Path(refused.path).name}: its tensors cannot be read: {refused.refused}"
    how = how_it_ended(ended.code) if ended.code else ended.why or "ended"
    said = [line for line in log.splitlines() if "rror" in line or "fail" in line or "mismatch" in line]
    linked = "" if ended.seen or ended.code else "; it must be built with -DBUILD_SHARED_LIBS=ON"
    words = f"{how}{last_words(said[0] if said else log)}{linked}"
    return f"{program}: computed no encoder's graph of {media.name}: it {words}"


class _Recorder(GraphRecorder):
    """Keeps a graph, what it is given, and what its last nodes gave; ``fed``: what went in, by its name."""

    fed: str | None = None
    results: tuple[()] = ()
    on_device = False

    def begin(self, number: int) -> None:
        """As who checks nodes."""

    settle = begin

    def asked(self, node: Node) -> None:
        """Before a node runs. Inputs and weights that are looked at by their place come with values later, or never."""
        super().asked(node)
        for source in node.sources:
            number = str(self.numbers[source.address])
            if source.name in FED and source.op == "NONE":
                self.fed = source.name
            if number in self.lacking and len(source.data):
                self.given[number] = source.values()
                self.lacking.discard(number)

    def _number(self, tensor: Node) -> int:
        is_new, self.whole = tensor.address not in self.numbers, bool(len(tensor.data))
        number = super()._number(tensor)
        if is_new and not self.whole and tensor.name not in self.weights:
            self.lacking.add(str(number))
        self.whole = True
        return number

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, 1, whole=True, in_steps=False)
        self.lacking = set[str]()
        self.last = dict[int, SentTensor]()

    def done(self, node: Node) -> None:
        """After it ran."""
        self.last[self.numbers[node.address]] = SentTensor(node.said, bytes(node.data), node.order)
        if len(self.last) > KEPT:
            del self.last[next(iter(self.last))]

    def judged_by_place(self, node: Node) -> None:
        self.asked(node)

    def pass_over(self, node: Node, why: str) -> None:
        self.asked(node)

    def graph(self, file: ModelFile, held: ProgramWeights, read: dict[str, str]) -> Graph:
        """The graph with the file's own weights, where they are: in float32, whatever llama.cpp rounds to."""
        for node in self.nodes:
            node["kind"] = "f32" if node["kind"] in HALVES else node["kind"]
        for leaf in self.leaves:
            number, name = str(leaf["number"]), read.get(leaf["name"], leaf["name"])
            shape = tuple(leaf["shape"])
            if name in file.weights and np.prod(file.weights.shape(name)) == np.prod(shape):
                leaf["name"] = name
                self.given.pop(number, None)
            elif leaf["name"] in held.weights:  # made while the file was read
                self.given[number] = np.asarray(held.weights.whole(leaf["name"]), np.float32).reshape(shape)
        self._name_nodes()
        rows = max((size for node in self.nodes for size in node["shape"]), default=1)
        return Graph.unpacked(self.packed([*range(rows)], {}))

    def _name_nodes(self) -> None:
        """Nodes that clip.cpp gives no name are called as the weight that they read, or as what attention does."""
        weights, layer = {leaf["number"]: leaf["name"] for leaf in self.leaves}, ""
        soft = {node["number"] for node in self.nodes if node["op"] == "SOFT_MAX"}
        scores = {source for node in self.nodes if node["op"] == "SOFT_MAX" for source in node["sources"][:1]}
        for node in self.nodes:
            read = next(
                (weights[number] for number in node["sources"] if _WEIGHT.search(weights.get(number, ""))), None
            )
            if node["op"] in VIEWS or (node["op"] == "CONT" and node["sources"][0] in weights):
                own = weights.get(node["sources"][0])
                weights |= {} if own is None else {node["number"]: own}
                continue
            stem = None if read is None else _WEIGHT.sub("", read)
            match = None if stem is None else _LAYERED.match(stem)
            layer = match[1] if match is not None else layer
            name = stem if match is None else f"{match[2]}-{layer}"
            if name is None and node["number"] in scores:
                name = f"attn_scores-{layer}"
            elif name is None and (node["number"] in soft or not soft.isdisjoint(node["sources"])):
                name = f"attn_probs-{layer}" if node["number"] in soft else f"attn_values-{layer}"
            if name is not None and node["name"].startswith(UNNAMED):
                node["name"] = name


class _Kept(WatchedGraph):
    """A graph that is kept, and not judged."""

    def __init__(self, structure: Any, held: ProgramWeights, request: Request, *more: Any) -> None:
        super().__init__(structure, held, request, *more)
        self.recorder = _Recorder(held.weights)

    @property
    def checker(self) -> Any:
        return self.recorder


def with_input(graph: Graph) -> tuple[Graph, GraphNode]:
    """The graph with a node in place of what was fed, by which it is lined up with what the model is given."""
    leaf = next(leaf for leaf in graph.leaves.values() if leaf.name in FED)
    number = next(number for number in count(max(graph.by_number) + 1) if number not in graph.leaves)
    given = {**graph.given, number: graph.given[leaf.number]}
    del given[leaf.number]
    leaves = {each: other for each, other in graph.leaves.items() if other is not leaf}
    leaves[number] = Leaf(number, f"{leaf.name} (given)", leaf.kind, leaf.shape)
    node = GraphNode(leaf.number, leaf.name, leaf.name, INPUT, leaf.kind, leaf.shape, bytes(64), (number,), None)
    return replace(graph, nodes=(node, *graph.nodes), leaves=leaves, given=given), node
