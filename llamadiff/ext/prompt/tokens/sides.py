"""Whoever tokenizes besides a stranger's engine: llama.cpp by a file, the independent tokenizer, a tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.prompt.tokenizer import Tokenizer
from llamadiff.ext.prompt.tokens.changes import Ids
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import DiedError, UserError
from llamadiff.system.input import check_regular
from llamadiff.system.progress import Progress
from llamadiff.trace.stated import reason

THIRD = "the independent tokenizer"
NO_TOKENIZER = "{}: the file has no tokenizer; give one that has"
DEATHS = 60  # of llama.cpp, until no more is asked: each text that it dies of takes as many as a search has steps
TOKENIZE, TOKENIZE_PLAIN, PIECES = (
    f"llamadiff.ext.prompt.errands:{name}" for name in ("tokenize_all", "tokenize_plain", "pieces_all")
)
AT_ONCE = 20_000  # texts of a request to llama.cpp

Asked = Callable[[Sequence[str]], "list[Ids | None]"]  # of each text its ids; None: it dies of that text


@dataclass(frozen=True)
class Side:
    """A tokenizer, and what it is called in a sentence.

    ``takes_bytes``: a text may be invalid UTF-8, as PEP 383 has it. ``original``: of the tokenizer that the model was
    made with, which is right by definition: what a file's tables and flags have that are not its; ``pre_tokenizers``:
    llama.cpp's names of the expressions that it states.
    """

    name: str
    ids: Asked
    takes_bytes: bool = False
    original: Callable[[ModelFile], Iterator[Oddity]] | None = None
    pre_tokenizers: tuple[str, ...] = ()


class LlamaCpp:
    """llama.cpp's vocabulary of a file, in a process that is made anew where it dies of what it is asked."""

    def __init__(self, model: Path, settings: Settings, progress: Progress) -> None:
        self.model, self.settings, self.progress = model, settings, progress
        self.files = tuple(map(str, ModelFile(model).weights.files))
        self.child = Child(settings)
        self.adds_bos: bool | None = None
        self.deaths = 0

    def ids(self, texts: Sequence[str]) -> list[Ids | None]:
        """Each text's ids with what the model adds, special tokens found in it."""
        return [None if each is None else tuple(each) for each in self._all(TOKENIZE, texts)]

    def plain_ids(self, texts: Sequence[str]) -> list[Ids | None]:
        """The same without what the model adds."""
        return [None if each is None else tuple(each) for each in self._all(TOKENIZE_PLAIN, texts)]

    def pieces(self) -> list[bytes]:
        """The bytes of each token. Raises UserError for a file without a tokenizer."""
        request = Request(str(self.model), self.files, errand=PIECES, settings=self.settings)
        found = self.child.ask(request, self.progress)["pieces"]
        if found is None:
            raise UserError(NO_TOKENIZER.format(self.model))
        return [piece.encode("latin-1") for piece in found]

    def _all(self, errand: str, texts: Sequence[str]) -> Iterator[list[int] | None]:
        for at in range(0, len(texts), AT_ONCE):
            yield from self._asked(errand, texts[at : at + AT_ONCE])

    def _asked(self, errand: str, texts: Sequence[str]) -> list[list[int] | None]:
        request = Request(str(self.model), self.files, errand=errand, texts=tuple(texts), settings=self.settings)
        try:
            answers = self.child.ask(request, self.progress)
        except DiedError:
            self.deaths += 1
            if self.deaths > DEATHS:
                raise
            self.child.__exit__()
            self.child = Child(self.settings)
            if len(texts) == 1:
                return [None]
            half = len(texts) // 2
            return self._asked(errand, texts[:half]) + self._asked(errand, texts[half:])
        if answers["ids"] is None:
            raise UserError(NO_TOKENIZER.format(self.model))
        self.adds_bos = answers["add_bos"]
        return list(answers["ids"])


@contextmanager
def llama_cpp(model: Path, settings: Settings, progress: Progress) -> Iterator[LlamaCpp]:
    """llama.cpp's tokenizer of a file. Raises UserError for a file without one."""
    vocabulary = LlamaCpp(model, settings, progress)
    try:
        yield vocabulary
    finally:
        vocabulary.child.__exit__()


def independent(tokenizer: Tokenizer, name: str = THIRD) -> Side:
    """This project's own, which shares no code with llama.cpp."""
    return Side(name, lambda texts: [tuple(tokenizer.encode(text)) for text in texts], takes_bytes=True)


def by_tokenizers(path: Path, special: bool = True) -> Side:
    """A tokenizer.json, by Hugging Face's own library. ``special``: with what it adds around a text.

    Raises UserError where that is not installed, or the file is none.
    """
    if find_spec("tokenizers") is None:
        raise UserError(f"{path}: needs tokenizers: pip install tokenizers")
    if not path.exists():
        raise UserError(f"{path}: no such file; give a tokenizer.json")
    check_regular(path, "a tokenizer.json")
    from tokenizers import Tokenizer as Theirs

    try:
        theirs = Theirs.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path}: is no tokenizer ({reason(error)})") from None
    theirs.no_truncation()
    theirs.no_padding()

    def ids(texts: Sequence[str]) -> list[Ids | None]:
        return [tuple(each.ids) for each in theirs.encode_batch(list(texts), add_special_tokens=special)]

    return Side(str(path), ids)
