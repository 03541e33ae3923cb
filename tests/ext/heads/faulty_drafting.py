"""Mistakes of speculative decoding, put into llama.cpp's process: errands, each a drafter with another step.

llama.cpp refuses some states that engines with such a mistake come to, where two keys are at one position. There the
keys that stayed are put in again with the batch of their position, which gives what these engines compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llamadiff.ext.heads.drafting import Context, Drafter, Row, carry_out


class Recording(Drafter):
    """What the head was given, beside what is done right."""

    fed: Sequence[Row] = ()  # the last batch of the trunk's tokens
    drafting: Sequence[Row] = ()  # the rows of the last drafts
    all_fed: dict[int, Row]

    def draft(self, position: int) -> Any:
        self.drafting = []
        return super().draft(position)

    def run_head(self, rows: Sequence[Row], last: bool = False) -> None:
        if last:
            self.drafting = [*self.drafting, rows[-1]]
        else:
            self.fed = rows
            self.all_fed = {**getattr(self, "all_fed", {}), **{row.position: row for row in rows}}
        self.run_rows(rows, last)

    def run_rows(self, rows: Sequence[Row], last: bool) -> None:
        super().run_head(rows, last)

    def run_together(self, rows: Sequence[Row]) -> None:
        """Rows of which some are at one position; the last one's hidden state is what is left."""
        self.head.run(rows, 0, ends=True)
        everything = Context.hidden(self.head)
        self.head.hidden = lambda: everything[-4 * self.head.width :]  # type: ignore[method-assign]


class Keeping(Recording):
    """Keys stay in the head's cache."""

    kept: list[Row]

    def run_rows(self, rows: Sequence[Row], last: bool) -> None:
        kept = [*getattr(self, "kept", []), *self.kept_now(last)]
        there = [row for row in kept if rows[0].position <= row.position <= rows[-1].position]
        self.run_together(sorted([*there, *rows], key=lambda row: row.position))

    def round(self) -> None:
        begins = len(self.text) - 1
        super().round()
        self.kept = self.keep(getattr(self, "kept", []), len(self.text) - 1 - begins)

    def kept_now(self, last: bool) -> Sequence[Row]:
        """What stays from earlier in the round."""
        return []

    def keep(self, kept: list[Row], added: int) -> list[Row]:
        raise NotImplementedError


class RefusedStay(Keeping):
    def keep(self, kept, added):
        return [*kept, *self.fed[added:]]


class FirstRefusedStays(Keeping):
    def keep(self, kept, added):
        return [*self.fed[added : added + 1]]


class LastRefusedStays(Keeping):
    def keep(self, kept, added):
        return [*self.fed[added:][-1:]]


class DraftedStay(Keeping):
    def kept_now(self, last):
        return [] if last else self.drafting

    def keep(self, kept, added):
        return [*kept, *self.drafting]


class GoesOut(Recording):
    """The last token goes into the head with another hidden state."""

    def round(self) -> None:
        before, begins = self.pending, len(self.text) - 1
        super().round()
        self.pending = self.going_out(before, len(self.text) - 2 - begins)

    def verify(self, tokens: Sequence[int], start: int, first: int = 0) -> bytes:
        self.seen = super().verify(tokens, start, first)
        return self.seen

    def going_out(self, before: bytes, accepted: int) -> bytes:
        raise NotImplementedError


class OfLastRefused(GoesOut):
    def going_out(self, before, accepted):
        return self.row_of(self.seen, self.most)


class OfFirstVerified(GoesOut):
    def going_out(self, before, accepted):
        return self.row_of(self.seen, 0)


class OfTwoBefore(GoesOut):
    def going_out(self, before, accepted):
        return self.row_of(self.seen, accepted - 1) if accepted else before


class OfTheHead(GoesOut):
    def next_row(self, row, drafts, hidden):
        self.own = [*(self.own if len(drafts) > 1 else []), hidden]
        return super().next_row(row, drafts, hidden)

    def going_out(self, before, accepted):
        return self.own[min(accepted, len(self.own) - 1)]


class OfZeros(GoesOut):
    def going_out(self, before, accepted):
        return bytes(len(self.pending))


class OfItself(GoesOut):
    """The trunk has run the token, too, before the head drafts."""

    def going_out(self, before, accepted):
        place = len(self.text) - 1
        own = super().verify(self.text[-1:], place)
        self.take_back(self.trunk, place)
        return own


class ChainOfTrunk(Drafter):
    def next_row(self, row, drafts, hidden):
        return Row(drafts[-1], row.position + 1, self.pending)


class ChainOfFirst(Drafter):
    def next_row(self, row, drafts, hidden):
        self.first = hidden if len(drafts) == 1 else self.first
        return Row(drafts[-1], row.position + 1, self.first)


class ChainOfZeros(Drafter):
    def next_row(self, row, drafts, hidden):
        return Row(drafts[-1], row.position + 1, bytes(len(hidden)))


class AcceptedAsDrafted(Recording):
    """What was drafted stays as it is, and is not run again with the trunk's hidden states."""

    def feed_head(self, tokens, start, hidden):
        self.trunks = len(self.text) > len(self.tokens)
        super().feed_head(tokens, start, hidden)

    def run_rows(self, rows, last):
        if not last and self.trunks:
            own = {row.position: row for row in self.drafting[1:]}
            rows = [own.get(row.position, row) for row in rows]
        super().run_rows(rows, last)


class OnePosition(Recording):
    """Each draft is at the first one's position."""

    def draft(self, position):
        self.so_far = []
        return super().draft(position)

    def run_rows(self, rows, last):
        if not last:
            return super().run_rows(rows, last)
        self.so_far = [*self.so_far, replace(rows[-1], position=len(self.text) - 1)]
        self.take_back(self.head, len(self.text) - 1)
        return self.run_together(self.so_far)


class PositionBefore(Recording):
    """Drafts are one position too early."""

    def draft(self, position):
        self.so_far = []
        return super().draft(position)

    def run_rows(self, rows, last):
        if not last:
            return super().run_rows(rows, last)
        place = len(self.text) - 2
        self.so_far = [*self.so_far, replace(rows[-1], position=rows[-1].position - 1)]
        self.take_back(self.head, place)
        return self.run_together([self.all_fed[place], *self.so_far])

    def take_back(self, context, start):
        super().take_back(context, start)
        if context is getattr(self, "head", None) and start == len(self.text) - 1 and self.drafting:
            super().take_back(context, start - 1)
            Drafter.run_head(self, [self.all_fed[start - 1]])


class PositionAfter(Drafter):
    """Drafts are one position too late: of a model with M-RoPE llama.cpp takes that."""

    def first_row(self, position):
        return replace(super().first_row(position), position=position + 1)


class TokenBefore(Drafter):
    def next_row(self, row, drafts, hidden):
        token = drafts[-2] if len(drafts) > 1 else self.text[-1]
        return Row(token, row.position + 1, hidden)


class TokenBeforeFirst(Drafter):
    def first_row(self, position):
        return replace(super().first_row(position), token=self.text[-2])


class NoKeys(Drafter):
    def round(self):
        self.take_back(self.head, 0)
        super().round()


class NoKeysOfPrompt(Drafter):
    def feed_head(self, tokens, start, hidden):
        if start:
            super().feed_head(tokens, start, hidden)


class OneHead(Drafter):
    def choose(self, number):
        super().choose(0 if len(self.text) > len(self.tokens) else number)


class StateWithoutPending(Drafter):
    """Where a recurrent state is put back, the hidden state before the round is not: as llama.cpp's server does."""

    def feed_head(self, tokens, start, hidden):
        if len(tokens) <= self.most and len(self.text) > len(self.tokens):
            self.pending = self.row_of(self.refused, self.most)
        self.refused = hidden
        super().feed_head(tokens, start, hidden)


# -- what the run says of itself ---------------------------------------------------------------------------------------


class NothingTakenBack(Drafter):
    def take_back(self, context, start):
        return None


class DraftsNotTakenBack(Drafter):
    """The head's cache alone, before what was drafted is verified."""

    def take_back(self, context, start):
        if context is self.trunk or start > len(self.text) - 1:
            super().take_back(context, start)


class OneTooFew(Drafter):
    def take_back(self, context, start):
        super().take_back(context, start + (context is self.head))


class OneTooMany(Drafter):
    def take_back(self, context, start):
        super().take_back(context, start - (context is self.head and len(self.text) > len(self.tokens) + 3))


class AnotherToken(Drafter):
    """The trunk's token is the second best."""

    def count_accepted(self, drafts, chosen):
        found = super().count_accepted(drafts, chosen)
        chosen[found] = (chosen[found] + 1) % self.n_vocab
        return found


class AnotherDraft(Drafter):
    def next_row(self, row, drafts, hidden):
        drafts[-1] = (drafts[-1] + 1) % self.n_vocab
        return super().next_row(row, drafts, hidden)


class OneMoreAccepted(Drafter):
    def count_accepted(self, drafts, chosen):
        return min(super().count_accepted(drafts, chosen) + 1, len(drafts))


class OneLessAccepted(Drafter):
    def count_accepted(self, drafts, chosen):
        return max(super().count_accepted(drafts, chosen) - 1, 0)


class CountedTokens(Drafter):
    """The trunk's own token is counted with the drafts."""

    def counted(self, accepted):
        return accepted + 1


class TrunkOfAnotherToken(Drafter):
    def verify(self, tokens, start, first=0):
        late = len(self.text) > len(self.tokens) + 3
        return super().verify([(tokens[0] + late) % self.n_vocab, *tokens[1:]], start, first)


class StateNotRestored(Drafter):
    """Recurrent states of refused drafts go on; what is beside them is taken out."""

    def speculate(self, drafts, wanted):
        real = Context.restore
        Context.restore = lambda context, saved: real(context, context.save())
        super().speculate(drafts, wanted)


# -- what was thought of when all else was done ------------------------------------------------------------------------


class Rounding(Drafter):
    """The trunk's hidden states are rounded on their way."""

    def verify(self, tokens, start, first=0):
        values = np.frombuffer(super().verify(tokens, start, first), np.float32)
        return self.rounded(values.reshape(-1, self.trunk.width)).astype(np.float32).tobytes()

    def rounded(self, values: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class HiddenInEightBits(Rounding):
    def rounded(self, values):
        scale = np.abs(values).max(axis=1, keepdims=True) / 127
        return np.round(values / scale) * scale


class HiddenInHalf(Rounding):
    def rounded(self, values):
        return values.astype(np.float16)


class HiddenInBfloat(Rounding):
    def rounded(self, values):
        bits = values.view(np.uint32)
        return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)


class OtherCacheOfTheHead(Drafter):
    """The head keeps its keys in float16, where the trunk has float32."""

    def speculate(self, drafts, wanted):
        real = self._room
        self._room = lambda settings: (
            replace(real(settings), type_k=1, type_v=1) if self.heads.api.of_a_head else real(settings)
        )
        try:
            super().speculate(drafts, wanted)
        finally:
            self._room = real


class LastKeyIsLost(Drafter):
    """Where all drafts are accepted, the last one's key is not made: the head never ran it."""

    def feed_head(self, tokens, start, hidden):
        made = tokens[:-1] if len(self.text) > len(self.tokens) else tokens
        super().feed_head(made, start, hidden)


class ChunksAreUnconnected(Drafter):
    """The first token of each part of a prompt is paired with zeros."""

    def feed_head(self, tokens, start, hidden):
        if len(self.text) == len(self.tokens):
            self.pending = bytes(len(self.pending))
        super().feed_head(tokens, start, hidden)


class RowsOneOff(Drafter):
    """The trunk's logits are those of the row before, all but the first."""

    def _verified(self, tokens, position):
        chosen, told, hidden = super()._verified(tokens, position)
        return [*chosen[:1], *chosen[:-1]], [*told[:1], *told[:-1]], hidden


class HeadIsTurnedOtherwise(Drafter):
    """RoPE's base of the head's context is another."""

    def speculate(self, drafts, wanted):
        real = self._room
        self._room = lambda settings: (
            replace(real(settings), rope_base=20000.0) if self.heads.api.of_a_head else real(settings)
        )
        try:
            super().speculate(drafts, wanted)
        finally:
            self._room = real


class DraftsAreSorted(Drafter):
    """The trunk is given the drafts in another order."""

    def _verified(self, tokens, position):
        return super()._verified([tokens[0], *sorted(tokens[1:])], position)


Errand = Callable[..., None]


def __getattr__(name: str) -> Errand:
    """``run_NAME``: the errand of a drafter."""
    if not name.startswith("run_"):
        raise AttributeError(name)
    return partial(carry_out, globals()[name.removeprefix("run_")])
