"""What a speculative run did, round by round, and what trunk and head give alone for the same tokens: plain data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request, Way
from llamadiff.llamacpp.sent_tensor import BYTE_ORDERS
from llamadiff.llamacpp.steps import Step
from llamadiff.system.progress import Progress

Array = NDArray[Any]
ERRAND = "llamadiff.ext.heads.drafting:run_drafting"
SPECULATE = "speculate"  # the call of the only step: drafts of a round, tokens that are wanted
ALL = 1 << 30  # no row is run by itself
Asked = Generator[dict[str, Any], Array, Any]  # questions, each answered by logits; no row: llama.cpp refuses it


@dataclass(frozen=True)
class Round:
    """Drafts behind the token at a ``position``, the last one of the text, and what the trunk chose behind that token
    and each draft, by their logits. ``ends``: the last positions of the head's cache before the trunk verified, and of
    the trunk's and the head's after the round.
    """

    position: int
    drafts: tuple[int, ...]
    chosen: tuple[int, ...]
    accepted: int
    ends: tuple[int, ...]
    logits: Array
    verified: Array

    @property
    def added(self) -> tuple[int, ...]:
        """The tokens that it adds to the text."""
        return (*self.drafts[: self.accepted], self.chosen[self.accepted])


@dataclass(frozen=True)
class Speculation:
    """A run: the ``prompt``, the token ``first`` chosen behind it by ``logits``, and rounds. ``drafted``, ``accepted``:
    what it counted; ``refused``: what llama.cpp would not do in it; ``heads``: how many the model has.
    """

    prompt: tuple[int, ...]
    first: int = -1
    logits: Array | None = None
    rounds: tuple[Round, ...] = ()
    drafted: int = 0
    accepted: int = 0
    refused: str = ""
    heads: int = 1

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt's tokens and those that were generated."""
        return (*self.prompt, self.first, *(token for each in self.rounds for token in each.added))

    def rows(self) -> Array:
        """The logits that each generated token was chosen by, of the trunk."""
        assert self.logits is not None
        return np.concatenate([self.logits, *(each.verified[: each.accepted + 1] for each in self.rounds)])


class Conversation:
    """Hears of a speculative run, then asks what ``judge`` wants to know; ``found`` is what comes of it."""

    def __init__(self, request: Request, judge: Callable[[Speculation], Asked], tell: Callable[..., None]) -> None:
        self.run, self.judge, self.tell = Speculation(request.tokens), judge, tell
        self.found: Any = None
        self.order, self.vocabulary = "<", 1

    def hear(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        """One answer, and the bytes that came with it."""
        if "prompt" in answer:
            self.order = BYTE_ORDERS[answer["prompt"]["order"]]
            self.vocabulary, heads = answer["prompt"]["vocabulary"], answer["prompt"]["heads"]
            self.run = replace(self.run, first=answer["prompt"]["chosen"], logits=self._rows(data[0]), heads=heads)
            return
        rows = [self._rows(blob) for blob in data]
        if "round" in answer:
            said = answer["round"]
            lists = {name: tuple(said[name]) for name in ("drafts", "chosen", "ends")}
            made = Round(**{**said, **lists}, logits=rows[0], verified=rows[1])
            self.run = replace(self.run, rounds=(*self.run.rounds, made))
        elif "counted" in answer:
            self.run = replace(self.run, **answer["counted"])
        elif "asks" in answer:
            self.asking = self.judge(self.run)
            self._ask(lambda: next(self.asking))
        elif "answer" in answer:
            self._ask(lambda: self.asking.send(rows[0]))
        elif "refused" in answer:
            self.run = replace(self.run, refused=answer["refused"])

    def _rows(self, blob: Any) -> Array:
        values = np.frombuffer(blob, f"{self.order}f4").astype(np.float32)
        return values.reshape(-1, self.vocabulary)

    def _ask(self, following: Callable[[], dict[str, Any]]) -> None:
        try:
            self.tell(asked=following())
        except StopIteration as end:
            self.found = end.value
            self.tell(asked=None)


def speculate(
    request: Request, drafts: int, judge: Callable[[Speculation], Asked], progress: Progress, patience: float
) -> Any:
    """Run llama.cpp with so many drafts a round until the request's tokens are there -> what ``judge`` says.

    Raises UserError.
    """
    wanted = request.n_predict
    way = Way(steps=(Step(SPECULATE, (drafts, wanted)),), callback=False)
    request = replace(request, errand=ERRAND, way=way, output=None, n_prefill=0, batches=(), n_predict=wanted + drafts)
    with Child(request.settings, patience) as child:
        conversation = Conversation(request, judge, child.tell)
        child.ask(request, progress, conversation.hear)
    return conversation.found


# -- questions ---------------------------------------------------------------------------------------------------------


def trunk_alone(tokens: Sequence[int], first: int, name: str, alone: int = ALL) -> dict[str, Any]:
    """The trunk on tokens: the logits of those from number ``first`` on. Hidden states are kept under the name."""
    return {"of": "trunk", "tokens": [*tokens], "first": first, "name": name, "alone": alone}


@dataclass(frozen=True)
class Row:
    """A token that a head is given, its position, and its hidden state: row ``number`` of those under a ``name``."""

    token: int
    position: int
    name: str = ""  # zeros
    number: int = 0


def head_alone(rows: Sequence[Row], part: int, name: str, alone: int = ALL) -> dict[str, Any]:
    """A head on rows: the logits of the last one, whose hidden state is kept under the name."""
    plain = [[row.token, row.position, row.name, row.number] for row in rows]
    return {"of": "head", "rows": plain, "part": part, "name": name, "alone": alone}
