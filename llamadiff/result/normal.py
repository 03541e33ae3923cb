"""Is it normal? What a slice says of how the layers' outputs grow, drift and stand out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One statistic in a sentence; ``since`` is the layer from which the sides differ, None where they are alike.

    ``code``: that this is a wrong op's doing.
    """

    word: str
    says: str
    since: int | None = None
    code: bool = False


@dataclass(frozen=True)
class Usual:
    """What is published of trained models, and where."""

    what: str
    source: str


@dataclass(frozen=True)
class Normal:
    """The ``answers`` for a comparison, and what is ``usual``, to hold them against."""

    answers: tuple[Answer, ...]
    usual: tuple[Usual, ...]
