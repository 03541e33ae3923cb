"""What the parent asks of the child process that runs llama.cpp, and what it is told. Plain data, sent as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llamadiff.llamacpp.steps import Step
from llamadiff.numerics.types import CACHE_TYPES

RUNNER = "LLAMADIFF_RUNNER"  # in the environment: the runner, where none is given
LONG = 256  # tokens; of longer prompts, what grows as their square is not recorded, and the free run is short
CPU, GPU, HELPER = "CPU", "GPU", "helper"  # kinds of devices; a helper (BLAS) has no memory but the CPU's
SCORES = ("kq-", "kq_soft_max-")  # taps that grow as the square of the tokens
TOKENIZING = "tokenizing the prompt"  # what llama.cpp is said to do meanwhile: it may die of a prompt


@dataclass(frozen=True)
class Settings:
    """How llama.cpp is run. These defaults make a baseline; llama.cpp's own do not (other kernels, hidden ops).

    ``llama_cpp``: the directory of a build or an install (empty: llama-cpp-python's); ``device``: where its layers are,
    or several, with a / between, among which they are ``split`` in parts as ``tensor_split`` says, 3/1 (ext/devices);
    ``runner``: the words that start the Python in which it runs (empty: this one). ``lora``: the file of an adapter,
    which is applied with ``lora_scale``.
    """

    type_k: str = "F32"
    type_v: str = "F32"
    flash_attn: bool = False
    gpu_layers: int = 0
    repack: bool = False
    threads: int = 0
    llama_cpp: str = ""
    device: str = ""
    split: str = ""
    tensor_split: str = ""
    lora: str = ""
    lora_scale: float = 1.0
    runner: str = field(default_factory=lambda: os.environ.get(RUNNER, ""))

    @property
    def place(self) -> Settings:
        """The usual ones for the same llama.cpp."""
        return Settings(llama_cpp=self.llama_cpp, runner=self.runner)

    @property
    def in_float32(self) -> Settings:
        """The same with a cache in float32, and every op of attention for itself."""
        return replace(self, type_k="F32", type_v="F32", flash_attn=False)

    @property
    def on_device(self) -> bool:
        """Whether layers are somewhere else than on the CPU."""
        return bool(self.gpu_layers) or self.device.upper() not in ("", "CPU")

    def to_json(self) -> dict[str, Any]:
        """What a trace says of them: no place on this machine, no device and no adapter where none was asked for."""
        said = asdict(self) | {"lora": os.path.basename(self.lora)}
        del said["llama_cpp"], said["runner"]
        if not self.lora:
            del said["lora"], said["lora_scale"]
        return {name: value for name, value in said.items() if value or name not in ("device", "split", "tensor_split")}

    @classmethod
    def from_stated(cls, said: object, whole: bool = False) -> Settings:
        """Those that a trace states of how values were made; the defaults for what it leaves out.

        ``whole``: and of where they were.
        """
        said = said if isinstance(said, dict) else {}
        k, v = (kind if kind in CACHE_TYPES else "F32" for kind in (said.get("type_k"), said.get("type_v")))
        made, count = cls(k, v, said.get("flash_attn") is True), said.get("gpu_layers")
        if not whole:
            return made
        return replace(
            made, gpu_layers=count if type(count) is int and count > 0 else 0, repack=said.get("repack") is True
        )


@dataclass(frozen=True)
class Way:
    """How tokens go through a context, where every way should come to the same.

    ``ubatch``: so many of a batch at a time (0: all); ``steps``: what is done to contexts instead, the tokens among
    others, by a slice's ``observer`` (passes.py); ``reused``: llama.cpp may compute a graph again that it has made;
    without ``callback`` nobody looks on, and the logits alone are recorded. ``rotated``: a quantized cache is rotated
    before, as llama.cpp does by itself, and no other engine. ``rope_base``, ``rope_scale``: RoPE's, where they are not
    the file's (0): positions are multiplied by the scale.
    """

    ubatch: int = 0
    steps: tuple[Step, ...] = ()
    reused: bool = True
    callback: bool = True
    rotated: bool = False
    rope_base: float = 0.0
    rope_scale: float = 0.0
    observer: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Way:
        return cls(**{**data, "steps": tuple(map(Step.from_json, data["steps"]))})


PLAIN = Way()


@dataclass(frozen=True)
class Request:
    """One run of ``tokens`` or ``text``, captured to ``output``; without a ``model``, a question about the library.

    ``n_prefill`` tokens (0: all) are run as one batch, or in ``batches``, the others one by one, each as it was given;
    ``n_predict`` more are llama.cpp's own choice. The first token is at position ``first``.
    ``scores``: attention scores are recorded however long the prompt is. ``nodes``: every node is checked as it runs,
    and ``output`` is what was found, as JSON. ``keep`` is a directory for wrong ops' inputs and outputs, and for
    those of ``keep_nodes``; ``only_list``: nodes are listed, not computed; ``pictures``: they have close-ups. ``graph``
    is a file for the graph itself, with every tap of it in ``output``, a trace, if that is given; ``keep_graph``: the
    trace itself holds the graph. ``patterns`` and ``layers`` (from, to before) are the user's words for the taps that
    are asked for; ``wanted`` are their names, where they are known before llama.cpp's graph is. ``files`` are the parts
    of a model that is split. ``bos`` is the text of the token that tokenizing adds, for a ``text`` that may begin with
    it already. ``way``: how tokens go through the context. ``errand``: something else than a run, ``module:function``,
    about ``texts``. ``other``: a second file of the same model, beside the first; ``window``: so many tokens of a text
    are run at a time (0: all), and ``most`` windows at most (0: all).
    ``weights``: names of the file's tensors, whose values nobody wants to be told; ``alone``: nothing else needs a core
    meanwhile; ``data``: bytes for an errand, in base64. ``pooled``: the text is embedded, with the model's pooling.
    ``listener``: what tells of the inputs of passes (passes.py); ``adapter``: what applies one; ``placing``: what says
    where layers are. ``scales_queries``: whether scores are made of Q that has the attention scale, where known: others
    are another thing, and not told.
    ``rows``: words for the tokens that are told of (ext/rows/choose.py), and of all tokens the taps ``everywhere``.
    """

    model: str
    files: tuple[str, ...] = ()
    text: str | None = None
    bos: str = ""
    tokens: tuple[int, ...] = ()
    n_predict: int = 0
    output: str | None = None
    wanted: tuple[str, ...] | None = None
    model_info: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    scores: bool = False
    nodes: bool = False
    keep_graph: bool = False
    keep: str | None = None
    keep_nodes: tuple[str, ...] = ()
    only_list: bool = False
    pictures: bool = False
    graph: str | None = None
    patterns: tuple[str, ...] = ()
    layers: tuple[int, int] | None = None
    n_prefill: int = 0
    batches: tuple[int, ...] = ()
    first: int = 0
    way: Way = PLAIN
    errand: str = ""
    texts: tuple[str, ...] = ()
    other: str = ""
    window: int = 0
    most: int = 0
    weights: tuple[str, ...] = ()
    alone: bool = False
    data: str = ""
    pooled: bool = False
    listener: str = ""
    adapter: str = ""
    placing: str = ""
    scales_queries: bool | None = None
    rows: str = ""
    everywhere: tuple[str, ...] = ()

    @property
    def layer_range(self) -> range | None:
        return None if self.layers is None else range(*self.layers)

    @property
    def computed_batches(self) -> tuple[int, ...]:
        """How many tokens are computed at a time, where it is not all of a batch as it was given."""
        most = self.way.ubatch or sys.maxsize
        given = self.batches or ((len(self.tokens),) if most < len(self.tokens) else ())
        return tuple(min(most, size - at) for size in given for at in range(0, size, most))

    @property
    def asked(self) -> dict[str, dict[str, Any]]:
        """What a trace says of a request for less than all taps (``layers``: the first and the last)."""
        less: dict[str, Any] = {"taps": list(self.patterns)} if self.patterns else {}
        if self.layers is not None:
            less["layers"] = [self.layers[0], self.layers[1] - 1]
        return {"asked": less} if less else {}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Request:
        names = ("files", "tokens", "wanted", "patterns", "layers", "batches", "texts", "weights", "everywhere",
                 "keep_nodes")  # fmt: skip
        lists = {name: tuple(data[name]) for name in names if data[name] is not None}
        made = {"settings": Settings(**data["settings"]), "way": Way.from_json(data["way"])}
        return cls(**{**data, **lists, **made})


def no_tap_fits(request: Request) -> str:
    """That ``patterns`` and ``layers`` leave nothing."""
    of = "" if request.layers is None else " of these layers"
    name = request.model_info["file"]
    return f"no tap{of} fits --only {' '.join(request.patterns)}; llamadiff taps {name} lists them"


Say = Callable[..., None]
