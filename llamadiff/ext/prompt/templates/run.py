"""The verb: does an engine render conversations as the model's chat template says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from llamadiff.ext.prompt.http import is_server
from llamadiff.ext.prompt.templates.apart import TextParting, text_parting
from llamadiff.ext.prompt.templates.conversations import Chosen, Conversation, Told, choose
from llamadiff.ext.prompt.templates.rendering import Cause, Source, source_of
from llamadiff.ext.prompt.templates.server_ways import REFUSED, TakenWay, Way, changed_by, taken
from llamadiff.ext.prompt.templates.sides import Answer, Ask, candidate_of, is_asked, template_of
from llamadiff.ext.prompt.templates.smallest import smallest
from llamadiff.judge.verdict import of_check
from llamadiff.system.progress import Progress, silent

FEW = 3  # places that are shown


@dataclass(frozen=True)
class Parting:
    """A conversation that the candidate renders otherwise: the template's text, and the candidate's or its error.

    ``offset``: the first character that is not the same; the template wrote it in ``line``, where that is known.
    """

    conversation: Conversation
    ours: str
    theirs: str | None
    error: str | None
    offset: int
    line: int | None


@dataclass(frozen=True)
class Place:
    """What parts at one line: the smallest such conversation, how many part there, what explains them all."""

    smallest: Parting
    count: int
    causes: Sequence[Cause] = ()


@dataclass(frozen=True)
class Templates:
    """A candidate's prompts against the template's, of what a server makes of conversations in its ``ways``.

    ``lacking_bos``: those without a BOS token that tokenizing adds. ``apart``: where the texts of two templates part.
    ``mistakes``: several that explain together what no single one does, but for ``left`` conversations.
    """

    source: Source
    candidate: str
    chosen: Chosen
    branches: Sequence[tuple[int, str]]
    parted: int
    places: Sequence[Place]
    lacking_bos: int = 0
    ways: tuple[TakenWay, ...] = ()
    apart: TextParting | None = None
    mistakes: Sequence[Cause] = ()
    left: int = 0

    @property
    def verdict(self) -> str:
        return of_check(self.parted, is_known=bool(self.chosen.conversations))

    @property
    def unreached(self) -> Sequence[tuple[int, str]]:
        """The branches that no conversation took."""
        return [branch for number, branch in enumerate(self.branches) if number not in self.chosen.reached]


def template(path: Path, candidate: str, patience: float, progress: Progress = silent) -> Templates:
    """Render conversations that reach a template's branches, and have the candidate do so. Raises UserError."""
    source = source_of(path)
    progress("making conversations")
    words, branches = source.words()
    takes = partial(is_asked, candidate)
    chosen = choose(source.told, words, len(branches), takes)
    with candidate_of(candidate, source, patience, progress) as ask:
        compared = _Compared(source, ask, takes)
        progress("asking the candidate")
        answers, conversations = ask(chosen.conversations), chosen.conversations
        partings = compared.partings(conversations, chosen.told, answers)
        lacking_bos, told = compared.lacking_bos, chosen.told
        ways: tuple[TakenWay, ...] = ()
        if is_server(candidate) and any(each is not None for each in partings):
            progress("looking for what the server does to messages")
            ways = taken(partial(compared.right_by, conversations, answers))
            compared.ways = [each.way for each in ways]
            told = compared.told(conversations)
            partings = compared.partings(conversations, told, answers)
        right = [
            Parting(conversation, what.get("text", ""), what.get("text"), None, 0, None)
            for conversation, what, parting in zip(conversations, told, partings, strict=True)
            if parting is None
        ]
        parted = [each for each in partings if each is not None]
        progress("looking for causes")
        mistakes, left, places = _explained(compared, parted, right)
    other = template_of(candidate, source)
    apart = text_parting(source.template, other.template) if other is not None else None
    return Templates(source, candidate, chosen, branches, len(parted), places, lacking_bos, ways, apart, mistakes, left)


class _Compared:
    """A candidate beside the template; ``ways``: what becomes of a conversation before that."""

    def __init__(self, source: Source, ask: Ask, takes: Callable[[Conversation], bool]) -> None:
        self.source, self.ask, self.takes, self.lacking_bos = source, ask, takes, 0
        self.ways: Sequence[Way] = ()

    def told(self, conversations: Sequence[Conversation]) -> list[Told]:
        """What the template makes of each."""
        return self._rendered([self.as_given(each) for each in conversations])

    def _rendered(self, given: Sequence[Conversation | None]) -> list[Told]:
        """Of each conversation that the template gets; the same ones are rendered once."""
        keys = [None if each is None else json.dumps(each) for each in given]
        new = {key: each for key, each in zip(keys, given, strict=True) if key is not None and each is not None}
        told = dict(zip(new, self.source.told([*new.values()]), strict=True))
        return [REFUSED if key is None else told[key] for key in keys]

    def as_given(self, conversation: Conversation) -> Conversation | None:
        """A conversation as the template gets it; None where it gets none."""
        return changed_by(self.ways, conversation)

    def partings(
        self, conversations: Sequence[Conversation], told: Sequence[Told], answers: Sequence[Answer]
    ) -> list[Parting | None]:
        """Of each conversation how the candidate's text parts, if it does."""
        whole = map(self._whole, answers, told)
        return [_parting(*each) for each in zip(conversations, told, whole, strict=True)]

    def right_by(
        self, conversations: Sequence[Conversation], answers: Sequence[Answer], sets: Sequence[Sequence[Way]]
    ) -> list[list[bool]]:
        """With each of some sets of ways, of which conversations the answers are right.

        Where a way makes the template refuse a conversation, that shows nothing.
        """
        told = iter(self._rendered([changed_by(ways, each) for ways in sets for each in conversations]))
        found = []
        for _ in sets:
            own = [next(told) for _ in conversations]
            apart = self.partings(conversations, own, answers)
            found.append(
                [part is None and (each is REFUSED or "text" in each) for part, each in zip(apart, own, strict=True)]
            )
        return found

    def smaller(self, found: Parting) -> Parting:
        """The smallest conversation that parts at the same line."""
        seen = {id(found.conversation): found}

        def parts(conversations: Sequence[Conversation]) -> list[bool]:
            told = self.told(conversations)
            rendered = [
                (each, what)
                for each, what in zip(conversations, told, strict=True)
                if "text" in what and self.takes(each)
            ]
            tried = [each for each, _ in rendered]
            for parting in self.partings(tried, [what for _, what in rendered], self.ask(tried)):
                if parting is not None and (parting.line, parting.error is None) == (found.line, found.error is None):
                    seen[id(parting.conversation)] = parting
            return [id(each) in seen for each in conversations]

        return seen[id(smallest(found.conversation, parts))]

    def _whole(self, answer: Answer, told: Told) -> Answer:
        """With the BOS token, where tokenizing adds it."""
        bos, text = self.source.tokens["bos_token"], answer.get("text")
        if (
            self.source.adds_bos
            and text is not None
            and told.get("text", "").startswith(bos)
            and not text.startswith(bos)
        ):
            self.lacking_bos += 1
            return {"text": bos + text}
        return answer


def _parting(conversation: Conversation, told: Told, answer: Answer) -> Parting | None:
    ours, theirs = told.get("text"), answer.get("text")
    if theirs == ours:
        return None
    if ours is None:
        return Parting(conversation, "", theirs, None, 0, None)
    if theirs is None:
        return Parting(conversation, ours, None, answer["error"], 0, None)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    offset = sum(1 for _ in same)
    return Parting(conversation, ours, theirs, None, offset, _line(told["pieces"], offset))


def _line(pieces: Sequence[tuple[int, str]], offset: int) -> int | None:
    """The template's line that wrote a character of its text; of what follows the text, the last one."""
    found = None
    for line, text in pieces:
        found = line if text else found
        if offset < len(text):
            break
        offset -= len(text)
    return found


def _explained(
    compared: _Compared, parted: Sequence[Parting], right: Sequence[Parting]
) -> tuple[Sequence[Cause], int, list[Place]]:
    """Several mistakes, how many they leave, and the places: one where one cause explains all, or several do all but
    a few, which are another; else one for each line, with what explains it.
    """
    parted = sorted(parted, key=lambda each: (len(each.ours), len(str(each.conversation))))
    causes = _causes(compared, parted, right) if parted else ()
    if causes or not parted:
        return (), 0, [Place(compared.smaller(each), len(parted), causes) for each in parted[:1]]
    mistakes, left = _several(compared, parted, right)
    if mistakes:
        shown = [(parted[0], len(parted) - len(left))] if 0 not in left else []
        shown += [(parted[left[0]], len(left))] if left else []
        return mistakes, len(left), [Place(compared.smaller(each), count) for each, count in shown]
    return (), 0, list(_by_line(compared, parted, right))


def _by_line(compared: _Compared, parted: Sequence[Parting], right: Sequence[Parting]) -> Iterator[Place]:
    """A place for each line at which some part, the first ones."""
    groups = dict[int | None, list[Parting]]()
    for each in parted:
        groups.setdefault(each.line, []).append(each)
    for group in list(groups.values())[:FEW]:
        found = _causes(compared, group, right) if len(groups) > 1 else ()
        yield Place(compared.smaller(group[0]), len(group), found)


def _several(
    compared: _Compared, parted: Sequence[Parting], right: Sequence[Parting]
) -> tuple[Sequence[Cause], Sequence[int]]:
    """What together gives the candidate's texts of these conversations, and the numbers of those that it leaves."""
    given = [compared.as_given(each.conversation) for each in (*parted, *right)]
    if any(each is None for each in given):
        return (), ()
    wanted = [each.theirs for each in (*parted, *right)]
    return compared.source.several([each for each in given if each is not None], wanted, len(parted))


def _causes(compared: _Compared, parted: Sequence[Parting], right: Sequence[Parting]) -> Sequence[Cause]:
    """What gives the candidate's texts of these conversations, and does not change those of others."""
    given = [(compared.as_given(each.conversation), each.theirs) for each in (*parted, *right)]
    every = [(conversation, theirs) for conversation, theirs in given if conversation is not None]
    return compared.source.causes([each for each, _ in every], [theirs for _, theirs in every])
