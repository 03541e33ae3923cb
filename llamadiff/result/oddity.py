"""What is wrong with a file beside its numbers' arithmetic. Plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llamadiff.engines.model_file import ModelFile


@dataclass(frozen=True)
class Oddity:
    """What is wrong at a place: a tensor, a metadata key, the tokenizer.

    ``certain``: wrong; else suspicious and no more. ``cause`` is the mistake's name, where it has one.
    """

    where: str
    says: str
    cause: str = ""
    certain: bool = True


class CheckpointTokenizer(Protocol):
    """A checkpoint's tokenizer, as a slice compares it with a file's."""

    def oddities(self, model: ModelFile) -> Iterator[Oddity]:
        """Where the tables and flags of the file are not the checkpoint's."""

    def ids(self, model: ModelFile) -> Sequence[Oddity | str]:
        """What asking both tokenizers comes to; notes are texts."""
