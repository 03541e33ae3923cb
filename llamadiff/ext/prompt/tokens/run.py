"""The verb: does a tokenizer give the ids that the file's does, on many texts; which of two is wrong, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from llamaref import ModelError

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.prompt.tokenizer import Tokenizer, as_original
from llamadiff.ext.prompt.tokens.candidates import candidate
from llamadiff.ext.prompt.tokens.changes import Change, Encode, Ids, changed, own_changes
from llamadiff.ext.prompt.tokens.explain import Explanation, explain
from llamadiff.ext.prompt.tokens.of_checkpoint import stated_otherwise
from llamadiff.ext.prompt.tokens.sides import THIRD, Side, independent, llama_cpp
from llamadiff.ext.prompt.tokens.smallest import smallest
from llamadiff.ext.prompt.tokens.texts import texts_for
from llamadiff.judge.verdict import of_check
from llamadiff.llamacpp.request import Settings
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError
from llamadiff.system.input import read_text
from llamadiff.system.progress import Progress
from llamadiff.trace.stated import parse_json, reason
from llamadiff.trace.token_text import Vocabulary

USUAL = 20_000  # texts
MAX_TEXTS = 1 << 26  # bytes of a file of them
SHOWN = 3  # texts that are shown with both splits
FOREIGN = 0.9  # of the texts, from which on a candidate that nothing explains may have another vocabulary
LLAMA_CPP, OWN = "llama.cpp", "the model's own"
FILE = "the file"


@dataclass(frozen=True)
class Wanted:
    """Which texts: so many that are made, from a ``seed``, or a user's ``own`` file."""

    count: int = USUAL
    own: Path | None = None
    seed: int = 1


MADE = Wanted()


@dataclass(frozen=True)
class Example:
    """A text, as small as it can be, and what each side makes of it: ids, and the texts of their tokens.

    ``is_left``: what explains nearly all others does not explain it.
    """

    text: str
    ids: Mapping[str, Ids | None]
    pieces: Mapping[str, tuple[str, ...]]
    is_left: bool = False


@dataclass(frozen=True)
class Tokens:
    """What came of it.

    ``parted``: texts of which the candidate has the ids of nobody else; ``own``: those of which it has the ids of the
    model's own tokenizer, where llama.cpp is known to have others (``ways`` say how); ``doubted``: those of which
    llama.cpp has other ids than the independent tokenizer in both ways, so that one of the two is wrong. ``wrong`` is
    the side that is, "" where nobody is or nobody can tell; ``no_third``: why there is no independent tokenizer.
    ``file_faults``: where the candidate is the model's own tokenizer: what the file's tables and flags have other.
    """

    model: str
    candidate: str
    texts: int
    parted: int
    own: int
    doubted: int
    verdict: str
    wrong: str
    explanation: Explanation | None
    examples: tuple[Example, ...]
    ways: tuple[tuple[Change, Example], ...]
    no_third: str = ""
    file_faults: tuple[Oddity, ...] = ()

    @property
    def is_foreign(self) -> bool:
        """Whether hardly any text has the right ids, and no mistake explains it."""
        return self.explanation is None and self.parted >= FOREIGN * self.texts > 0


def tokens(
    model: Path, spec: str | None, settings: Settings, progress: Progress, wanted: Wanted = MADE, patience: float = 60.0
) -> Tokens:
    """A candidate's ids against llama.cpp's, and against the independent tokenizer's; these two without a candidate.

    Raises UserError for whatever a user can mend.
    """
    file = ModelFile(model)
    fields = file.weights.fields
    third, no_third = _third(fields)
    if spec is None and third is None:
        raise UserError(f"{model}: {no_third}; give --candidate")
    with ExitStack() as stack:
        vocabulary = stack.enter_context(llama_cpp(model, settings, progress))
        baseline = Side(LLAMA_CPP, vocabulary.ids, takes_bytes=True)
        other = stack.enter_context(candidate(spec, settings, progress, patience)) if spec is not None else None
        texts = _texts(wanted, fields, takes_bytes=other is None or other.takes_bytes)
        sides = _Sides(fields, texts, baseline, other, third, progress)
        try:
            found = sides.judged(model.name, no_third)
            return replace(found, file_faults=_file_faults(file, other, found.wrong, found.explanation))
        except ModelError as error:  # a table that is read late
            raise UserError(f"{model}: {error}") from None


def _file_faults(
    file: ModelFile, other: Side | None, wrong: str, explanation: Explanation | None
) -> tuple[Oddity, ...]:
    """What the file has other than the model's own tokenizer: tables and flags, and what a flag would explain."""
    if other is None or other.original is None:
        return ()
    tables = [*other.original(file)]
    stated = [each.stated for each in explanation.mistakes if each.stated] if explanation and wrong == FILE else []
    known = {each.where for each in tables}
    flags = [
        stated_otherwise(file.weights.fields, each, Path(other.name).name) for each in stated if each[0] not in known
    ]
    return (*flags, *tables)


def _third(fields: Mapping[str, Any]) -> tuple[Tokenizer | None, str]:
    """The independent tokenizer, or why it does not know the file's."""
    try:
        return Tokenizer(fields), ""
    except ModelError as error:
        return None, f"the independent tokenizer does not know this one ({error})"


def _texts(wanted: Wanted, fields: Mapping[str, Any], takes_bytes: bool) -> list[str]:
    """A user's texts, or those made for the tokenizer, each once."""
    own = wanted.own
    if own is None:
        return list(islice(texts_for(fields, wanted.seed, takes_bytes), wanted.count))
    lines = read_text(own, MAX_TEXTS, "texts, one a line, as JSON strings or as they are").splitlines()
    if not lines:
        raise UserError(f"{own}: has no texts; give texts, one a line")
    if own.suffix in {".json", ".jsonl"}:
        return [_string(own, number, line) for number, line in enumerate(lines, 1)]
    return lines


def _string(path: Path, number: int, line: str) -> str:
    try:
        text = parse_json(line)
    except ValueError as error:
        raise UserError(f"{path}:{number}: not JSON ({reason(error)}); give a JSON string a line") from None
    if not isinstance(text, str):
        raise UserError(f"{path}:{number}: {line[:40]} is no JSON string")
    return text


class _Sides:
    """All that tokenize, and their ids of all texts."""

    def __init__(
        self, fields: Mapping[str, Any], texts: Sequence[str], baseline: Side, other: Side | None,
        third: Tokenizer | None, progress: Progress,
    ) -> None:  # fmt: skip
        self.texts, self.baseline, self.other, self.third, self.progress = texts, baseline, other, third, progress
        self.vocabulary = Vocabulary(fields)
        self.as_llama_cpp = independent(third) if third is not None else None
        original = third.with_rules(as_original(third.rules)) if third is not None else None
        self.original = independent(original, OWN) if original is not None else None
        progress(f"llama.cpp tokenizes {len(texts)} texts")
        self.right = baseline.ids(texts)
        self.found = self.right
        if other is not None:
            progress(f"{other.name} tokenizes {len(texts)} texts")
            self.found = other.ids(texts)

    def judged(self, model: str, no_third: str) -> Tokens:
        """All of it."""
        apart = [n for n, (one, another) in enumerate(zip(self.found, self.right, strict=True)) if one != another]
        everywhere = range(len(self.texts)) if self.other is None else apart
        doubted, own = self._opinions(everywhere)
        parted = [n for n in apart if n not in own]
        explanation = None
        if parted and self.third is not None:
            self.progress("trying what may be wrong")
            stated = self.other.pre_tokenizers if self.other is not None else ()
            explanation = explain(self.third, self.texts, self.found, self.right, stated)
            if explanation is not None and not explanation.mistakes:  # some of llama.cpp's ways, some of the model's
                own, parted = own | {*parted}, []
        wrong, verdict = self._wrong(parted, doubted, own)
        shown = self._left(explanation) + self._examples(parted or doubted, bool(parted))
        name = self.other.name if self.other is not None else THIRD
        return Tokens(model, name, len(self.texts), len(parted), len(own), len(doubted), verdict, wrong, explanation,
                      shown, tuple(self._ways(sorted(own))), no_third)  # fmt: skip

    def _opinions(self, numbers: Sequence[int]) -> tuple[list[int], set[int]]:
        """Where llama.cpp's ids are nobody's, and where the candidate's are the independent tokenizer's and not these.

        The independent one reads a file as llama.cpp does, and as the model's own tokenizer: either is right. Without a
        candidate the second is where llama.cpp's are not the model's own.
        """
        if self.as_llama_cpp is None or self.original is None:
            return [], set()
        self.progress("the independent tokenizer tokenizes")
        texts = [self.texts[n] for n in numbers]
        rows = [*zip(numbers, self.as_llama_cpp.ids(texts), self.original.ids(texts), strict=True)]
        doubted = [n for n, *ids in rows if self.right[n] not in ids]
        if self.other is None:
            return doubted, {n for n, _, original in rows if original != self.right[n]}
        return doubted, {n for n, *ids in rows if self.found[n] in ids}

    def _wrong(self, parted: Sequence[int], doubted: Sequence[int], own: set[int]) -> tuple[str, str]:
        """The side that is wrong, and the verdict."""
        if parted:
            agree = self.as_llama_cpp is not None and not {*doubted} & {*parted}
            blamed = "" if self.other is None else FILE if self.other.original is not None else self.other.name
            return (blamed if agree else ""), of_check(parted)
        if self.other is None:
            return "", of_check(False, is_known=not doubted)
        if {*doubted} & own:  # the candidate and the independent one agree, and llama.cpp does what it does not mean
            return LLAMA_CPP, of_check(doubted)
        return "", of_check(False)

    def _examples(self, numbers: Sequence[int], of_candidate: bool) -> tuple[Example, ...]:
        """The smallest texts on which the candidate parts, or llama.cpp from the independent tokenizer."""
        found = dict[str, Example]()
        for number in sorted(numbers, key=lambda n: len(self.texts[n]))[:SHOWN]:
            text = smallest(self.texts[number], self._candidate_parts if of_candidate else self._llama_parts)
            if text not in found:
                found[text] = self._example(text)
        return tuple(sorted(found.values(), key=lambda each: len(each.text)))

    def _left(self, explanation: Explanation | None) -> tuple[Example, ...]:
        """The smallest text that is left of those that a mistake explains."""
        if explanation is None or not explanation.left:
            return ()
        assert self.other is not None
        assert self.third is not None
        encode, ask = changed(self.third, explanation.changes), self.other.ids

        def parts(texts: Sequence[str]) -> list[bool]:
            return [ids != encode(text) for text, ids in zip(texts, ask(texts), strict=True)]

        text = smallest(min((self.texts[n] for n in explanation.left), key=len), parts)
        return (replace(self._example(text), is_left=True),)

    def _candidate_parts(self, texts: Sequence[str]) -> list[bool]:
        assert self.other is not None
        accepted = [side.ids(texts) for side in (self.baseline, self.original) if side is not None]
        return [all(ids[n] != each for ids in accepted) for n, each in enumerate(self.other.ids(texts))]

    def _llama_parts(self, texts: Sequence[str]) -> list[bool]:
        expected = [side.ids(texts) for side in (self.as_llama_cpp, self.original) if side is not None]
        return [all(ids[n] != each for ids in expected) for n, each in enumerate(self.baseline.ids(texts))]

    def _ways(self, numbers: Sequence[int]) -> Iterator[tuple[Change, Example]]:
        """Each known way in which llama.cpp is not the model's own tokenizer, with the smallest text that shows it."""
        if self.third is None:
            return
        texts = [self.texts[n] for n in sorted(numbers, key=lambda n: len(self.texts[n]))]
        plain = self.third
        for way in own_changes(plain.rules):
            encode = changed(plain, [way])

            def parts(tried: Sequence[str], encode: Encode = encode) -> list[bool]:
                return [encode(text) != tuple(plain.encode(text)) for text in tried]

            shown = next((text for text in texts if parts([text])[0]), None)
            if shown is not None:
                yield way, self._example(smallest(shown, parts))

    def _example(self, text: str) -> Example:
        sides = filter(None, (self.other or self.as_llama_cpp, self.original))
        ids = {side.name: side.ids([text])[0] for side in (self.baseline, *sides)}
        if ids.get(LLAMA_CPP) == ids.get(OWN):
            ids.pop(OWN, None)
        pieces = {name: tuple(self.vocabulary.text(i) or f"[{i}]" for i in each or ()) for name, each in ids.items()}
        return Example(text, ids, pieces)
