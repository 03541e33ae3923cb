"""What is said of a run: the finding in one line, and the clauses that prove it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """A headline, and what stands under it, each a clause that could end a sentence."""

    headline: str
    clauses: tuple[str, ...] = ()

    def plus(self, *clauses: str) -> Message:
        """The same, with more under it."""
        return Message(self.headline, (*self.clauses, *clauses))

    def with_headline(self, headline: str) -> Message:
        """The same, under a finding that goes before it."""
        return Message(headline, (self.headline, *self.clauses))

    @property
    def sentence(self) -> str:
        return "; ".join((self.headline, *self.clauses))
