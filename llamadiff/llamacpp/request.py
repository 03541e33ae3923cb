"""What the parent asks of the child process that runs llama.cpp, and what it is told. Plain data, sent as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llamadiff.numerics.types import CACHE_TYPES

LONG = 256  # tokens; of longer prompts, what grows as their square is not recorded, and the free run is short
TOKENIZING = "tokenizing the prompt"  # what llama.cpp is said to do meanwhile: it may die of a prompt


@dataclass(frozen=True)
class Settings:
    """How llama.cpp is run. These defaults make a baseline; llama.cpp's own do not (other kernels, hidden ops)."""

    type_k: str = "F32"
    type_v: str = "F32"
    flash_attn: bool = False
    gpu_layers: int = 0
    repack: bool = False
    threads: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def stated(cls, said: object) -> Settings:
        """Those that a trace states of how values were made; the defaults for what it leaves out."""
        said = said if isinstance(said, dict) else {}
        k, v = (kind if kind in CACHE_TYPES else "F32" for kind in (said.get("type_k"), said.get("type_v")))
        return cls(k, v, said.get("flash_attn") is True)


@dataclass(frozen=True)
class Request:
    """One run of ``tokens`` or ``text``, captured to ``output``; without it, only a question about the library.

    ``n_prefill`` tokens (0: all) are run in one go, or in ``batches``, the others one by one, each as it was given;
    ``n_predict`` more are llama.cpp's own choice. The first token is at position ``first``.
    ``scores``: attention scores are recorded however long the prompt is. ``nodes``: every node is checked as it runs,
    and ``output`` is what was found, as JSON. ``keep`` is a directory for wrong ops' inputs and outputs (``keep_all``:
    for all ops'); ``only_list``: nodes are listed and not computed; ``pictures``: close-ups of
    them are kept. ``graph`` is a file for the graph itself, with
    every tap of it in ``output``, a trace. ``patterns`` and ``layers`` (from, to before) are the user's words for the
    taps that are asked for; ``wanted`` are their names, where they are known before llama.cpp's graph is. ``files`` are
    the parts of a model that is split. ``bos`` is the text of the token that tokenizing adds, for a ``text`` that may
    begin with it already. ``errand``: something else than a run (errands.py), about ``texts``.
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
    keep: str | None = None
    keep_all: bool = False
    only_list: bool = False
    pictures: bool = False
    graph: str | None = None
    patterns: tuple[str, ...] = ()
    layers: tuple[int, int] | None = None
    n_prefill: int = 0
    batches: tuple[int, ...] = ()
    first: int = 0
    errand: str = ""
    texts: tuple[str, ...] = ()

    @property
    def layer_range(self) -> range | None:
        return None if self.layers is None else range(*self.layers)

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
        names = ("files", "tokens", "wanted", "patterns", "layers", "batches", "texts")
        lists = {name: tuple(data[name]) for name in names if data[name] is not None}
        return cls(**{**data, **lists, "settings": Settings(**data["settings"])})


def no_tap_fits(request: Request) -> str:
    """That ``patterns`` and ``layers`` leave nothing."""
    of = "" if request.layers is None else " of these layers"
    name = request.model_info["file"]
    return f"no tap{of} fits --taps {' '.join(request.patterns)}; llamadiff taps {name} lists them"


Say = Callable[..., None]
