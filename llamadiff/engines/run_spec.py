"""What a user asks for: a Run, what is run and recorded, and a How, how it is judged. They travel as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llamadiff.llamacpp.request import Settings
from llamadiff.numerics.tolerances import RULES, Rule
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent


@dataclass(frozen=True)
class Run:
    """What is run and recorded: a prompt or token ids, and ``n_predict`` more that llama.cpp chooses.

    ``chat``: the prompt goes through the model's chat template. Of the taps, those of ``patterns`` and ``layers``
    (empty, None: all) are recorded.
    """

    prompt: str | None = None
    tokens: Sequence[int] = ()
    chat: bool = False
    n_predict: int = 0
    patterns: Sequence[str] = ()
    layers: range | None = None
    settings: Settings = field(default_factory=Settings)

    @property
    def is_partial(self) -> bool:
        """Whether less than all taps are asked for."""
        return bool(self.patterns) or self.layers is not None


@dataclass(frozen=True)
class Gate:
    """How far logits may be apart over all positions: limits of the mean and the 99th percentile of the KL, in nats.

    None: as far as rounding explains.
    """

    mean: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class Costing:
    """What is asked of two files of one model besides a prompt: a ``text`` to measure on, and bytes to ``spend``."""

    text: str | None = None
    text_name: str | None = None
    spend: int = 0


Rules = Sequence[Rule]


@dataclass(frozen=True)
class How:
    """How a run is judged, and by what.

    ``engine``: "numpy" or "graph", llama.cpp's graph node by node (None: the engine where it knows the architecture),
    in ``precision``. ``diagnose``: look for the causes of what is wrong; ``explain``: for so many seconds;
    ``thorough``, which those imply: through spans of any length, up to the whole model. ``partial``: what was recorded
    is enough, though the logits are not among it. ``expect``: tokens that the table of logits is to have. ``name_map``
    names or is a map of a candidate's tensor names; ``timeout``: the seconds that its command may take. ``gate``:
    logits are held to limits over all positions. ``pictures``: close-ups of taps and the logits of every position are
    kept, which a page shows. ``rows``: those of a long prompt that are judged. ``costing`` is about a candidate that is
    another file of the model. ``steps``: a file of them, which a candidate's command carries out.
    """

    rules: Rules = RULES
    engine: str | None = None
    precision: str = "f32"
    diagnose: bool = True
    explain: float = 0.0
    thorough: bool = False
    partial: bool = False
    expect: Sequence[int] = ()
    name_map: str | None = None
    timeout: float = 600.0
    progress: Progress = silent
    gate: Gate | None = None
    pictures: bool = False
    rows: str | None = None
    costing: Costing = field(default_factory=Costing)
    steps: Path | None = None

    @property
    def is_thorough(self) -> bool:
        return self.thorough or self.explain > 0

    def expected_of(self, vocabulary: int) -> Sequence[int]:
        """The tokens that the table of logits is to have. Raises UserError for one that the vocabulary lacks."""
        beyond = next((token for token in self.expect if not 0 <= token < vocabulary), None)
        if beyond is not None:
            raise UserError(f"--expect {beyond}: there are {vocabulary} logits, of tokens 0 to {vocabulary - 1}")
        return self.expect


USUAL = How()
