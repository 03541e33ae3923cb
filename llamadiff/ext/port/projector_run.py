"""The verb for a projector file: is llama.cpp's graph of an eye or an ear what the checkpoint's own code computes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How
from llamadiff.ext.file.projector_keys import AGAIN, Stated, key_oddities
from llamadiff.ext.graph.graph import Graph
from llamadiff.ext.graph.model import GraphModel
from llamadiff.ext.port.alignment import distance
from llamadiff.ext.port.causes import Causes
from llamadiff.ext.port.faults import said, with_faults
from llamadiff.ext.port.graph_values import node_values
from llamadiff.ext.port.lineup import LiningUp
from llamadiff.ext.port.loading import kept_by_values
from llamadiff.ext.port.places import Apart, Reasons, joined, places_of
from llamadiff.ext.port.projector_graph import SENSES, projector_graph
from llamadiff.ext.port.projector_model import config_of, projector_model
from llamadiff.ext.port.projector_tensors import THE_FILES, with_tensors
from llamadiff.ext.port.run import Port
from llamadiff.ext.port.sides import FILE, Blame, shows_at, side_of, unstated
from llamadiff.ext.port.tensors import Tensors
from llamadiff.ext.port.torch_ops import layers_of
from llamadiff.ext.prompt.own_code import is_function
from llamadiff.ext.pytorch.transformers import config_read
from llamadiff.llamacpp.request import Settings
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError

WORDS = ("text_config.", "decoder_config.")  # numbers of a config that are of the text model
_LAYER = re.compile(r"[va]\.blk\.([0-9]{1,4})\.")


@dataclass(frozen=True)
class Media:
    """What is looked at or listened to: ``sense`` is the option's name."""

    sense: str
    path: Path


def media_of(image: Path | None, audio: Path | None, is_asked: bool) -> Media | None:
    """What is looked at or listened to, if anything is; ``is_asked``: a prompt is. Raises UserError for both."""
    given = {"image": image, "audio": audio}
    found = [Media(sense, path) for sense, path in given.items() if path is not None]
    if len(found) > 1:
        raise UserError(f"--image {image} and --audio {audio}: give one of them; each is an encoder of its own")
    if found and is_asked:
        raise UserError(
            f"--{found[0].sense} {found[0].path}: a projector is given no prompt and no tokens; leave them out"
        )
    return found[0] if found else None


def port_projector(path: Path, checkpoint: str, media: Media, settings: Settings, how: How) -> Port:
    """Line up the part of a checkpoint that sees or hears with llama.cpp's graph of its file. Raises UserError."""
    file, is_own = ModelFile(path, settings=replace(settings, lora="")), is_function(checkpoint)
    _check_is_projector(file, media.sense)
    how.progress("asking llama.cpp for its graph")
    run = projector_graph(file, media.sense, media.path, settings, how.progress)
    n_layer = _layers_in(run.graph)
    how.progress("loading the checkpoint")
    with config_read() as read:
        model = projector_model(checkpoint, media.sense, run.graph.given[_fed_leaf(run.graph)], n_layer)
        quantized = kept_by_values(model, file)
        graph = ProjectorModel(path, run.graph, SENSES[media.sense], file)
        how.progress("computing llama.cpp's graph")
        values = node_values(graph.graph, graph.weights)
        how.progress("lining up the model with it")
        causes = Causes(graph)
        lining = LiningUp(model, graph.graph, graph.weights, values, len(layers_of(model)), causes.edits)
        found = lining.run()
    last = lining.graph.nodes[-1]
    places, faults = list[Apart](), list[Oddity]()
    misplaced, unsaid = list[str](), dict[str, float]()
    if found.departed:
        how.progress("searching for causes")
        config = config_of(model)
        faults = list(_other_keys(file, config, media.sense))
        unsaid = {name: x for name, x in unstated(file, config, read).items() if not name.startswith(WORDS)}
        tensors = Tensors(graph.weights, file.architecture, lining.parameters, [name for name, _ in layers_of(model)])
        reasons = Reasons(lining, graph.graph, tensors, None)
        blame = Blame(tuple(each.where for each in faults), unsaid, None, is_own, {})
        places = [
            replace(place, side=reasons.side(place, blame.of(place.name, _own(place.says), place.text, place.layers)))
            for place in joined(places_of(found.departed, causes, reasons.of))
        ]
        places = with_faults(places, faults, graph.graph, file.tensors)
        places = with_tensors(places, lining, found.departed, tensors)
        for number, place in enumerate(places):
            key = None if place.fault else _said_by_a_key(file, media.sense, place.name, place.says)
            places[number] = place if key is None else replace(place, fault=f"{key}; the model {place.says}", side=FILE)
        misplaced = reasons.misplaced
    told = [
        side_of(place.name, _own(place.says), place.text, (), {name: x}, "")
        for place in places
        for name, x in unsaid.items()
    ]
    unsaid = unsaid if any(told) else {}  # most are in llama.cpp's code, and need no key
    shown = {place.fault.partition(" (and ")[0] for place in places if place.fault is not None}
    keys = [key for key in said(faults) or misplaced if key.removeprefix(THE_FILES) not in shown]
    same_end = last is graph.graph.nodes[-1]
    ran = run.own.get(last.number)
    own = float("nan") if ran is None else distance(ran.ravel(), values[last.number].ravel())
    return Port(
        graph.describe(), type(model).__name__, (), {"name": run.by, "version": run.by},
        places, found, found.logits, own, keys, unsaid, None,
        quantized, end=None if same_end else last.label, fed=_fed_words(run.graph, media, run.parts),
    )  # fmt: skip


class ProjectorModel(GraphModel):
    """A projector file and a recorded graph of it; ``sense`` is what its keys call it."""

    def __init__(self, path: Path, graph: Graph, sense: str, file: ModelFile) -> None:
        self.sense = sense
        super().__init__(path, graph, weights=file.weights)

    def hyper_parameter(self, key: str) -> Any:
        return self.weights.fields.get(f"clip.{self.sense}.{key}")


def _other_keys(file: ModelFile, config: Mapping[str, Any], sense: str) -> Iterator[Oddity]:
    """The keys of an encoder that do not say what the checkpoint does, as ``weights`` says it."""
    others = tuple(f"clip.{word}." for word in SENSES.values() if word != SENSES[sense])
    for each in key_oddities(file, Stated(config, {}, "")):
        if not each.where.startswith(others):
            yield replace(each, says=each.says.removesuffix(f"; {AGAIN.format(file=file.path.name)}"))


def _said_by_a_key(file: ModelFile, sense: str, place: str, says: str) -> str | None:
    """A key that has llama.cpp's number at a place, where the model's is in no config, as Whisper's epsilon is."""
    match = re.search(r"where llama\.cpp has ([-+.e0-9]+)", says)
    fields = file.weights.fields.items() if match is not None else ()
    own = {key: f"{x:g}" for key, x in fields if key.startswith(f"clip.{SENSES[sense]}.") and isinstance(x, float)}
    return next((f"{key}: is {x}" for key, x in own.items() if match and x == match[1] and shows_at(key, place)), None)


def _own(says: str) -> str:
    """What is said of the model alone: a number of llama.cpp's tells nothing of the file."""
    return re.split(r"[,;] (?:where )?llama\.cpp", says, maxsplit=1)[0]


def _check_is_projector(file: ModelFile, sense: str) -> None:
    """Raise UserError for a file that is no projector, or has none of this sense."""
    fields = file.weights.fields
    if not any(fields.get(f"clip.has_{word}_encoder") for word in SENSES.values()):
        raise UserError(
            f"{file.path}: is a {file.architecture} model, and --{sense} is for a projector file (mmproj.gguf); "
            "give a prompt in its place"
        )
    if not fields.get(f"clip.has_{SENSES[sense]}_encoder"):
        other = next((option for option, word in SENSES.items() if fields.get(f"clip.has_{word}_encoder")), None)
        raise UserError(f"{file.path}: has no {SENSES[sense]} encoder" + (f"; give --{other} FILE" if other else ""))


def _layers_in(graph: Graph) -> int:
    """How many layers' weights a graph reads."""
    numbers = [int(match[1]) for leaf in graph.leaves.values() if (match := _LAYER.match(leaf.name)) is not None]
    if not numbers:
        raise UserError("the encoder's graph reads no weights of layers (v.blk.N, a.blk.N): it cannot be lined up")
    return 1 + max(numbers)


def _fed_leaf(graph: Graph) -> int:
    number = graph.nodes[0].sources[0]
    assert number is not None
    return number


def _fed_words(graph: Graph, media: Media, parts: int) -> str:
    sizes: Sequence[int] = [size for size in graph.nodes[0].shape if size > 1]
    more = f", the first of {parts} such" if parts > 1 else ""
    return f"both sides were given what llama.cpp made of {media.path.name}, {' x '.join(map(str, sizes))}{more}"
