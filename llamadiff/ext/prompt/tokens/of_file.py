"""The tokenizer of another file of the model against a file's: keys that one of both lacks, and chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.prompt.templates.apart import KEY as TEMPLATE
from llamadiff.ext.prompt.templates.apart import template_oddities, templates_of
from llamadiff.ext.prompt.tokens.lacking import lacking
from llamadiff.ext.prompt.tokens.of_checkpoint import Tokenizers, table_oddities
from llamadiff.result.oddity import Oddity
from llamadiff.trace.stated import brief

OF_TOKENIZERS, TOKENS = "tokenizer.", "tokenizer.ggml.tokens"


class FileTokenizer:
    """The side of another file."""

    def __init__(self, path: Path) -> None:
        self.other = ModelFile(path)

    def ids(self, model: ModelFile) -> Sequence[Oddity | str]:
        """Nothing: what both files' keys say is compared."""
        return ()

    def oddities(self, model: ModelFile) -> Iterator[Oddity]:
        """Where tables part, where one file's keys lack what the other's have and that decides ids, and where templates
        part.
        """
        named = Tokenizers(self.other.path, {}, {}, self.other.weights.fields)
        if TOKENS in self.other.weights.fields:
            yield from table_oddities(model, named)
        sides = {side: side.path.name for side in (model, self.other)}
        if len({*sides.values()}) == 1:
            sides = {side: str(side.path) for side in (model, self.other)}
        for lacks, has in ((model, self.other), (self.other, model)):
            ours, theirs = lacks.weights.fields, has.weights.fields
            for key in sorted(theirs.keys() - ours.keys()):
                if key.startswith(OF_TOKENIZERS) and not key.startswith(TEMPLATE):
                    yield from _lacking(lacks, sides[lacks], sides[has], key, theirs[key])
        yield from self._templates(model, sides[model], sides[self.other])

    def _templates(self, model: ModelFile, own: str, label: str) -> Iterator[Oddity]:
        """In this direction those that part and those that the file lacks, in the other those that it has alone."""
        ours, theirs = model.weights.fields, self.other.weights.fields
        fix = "convert again the one that is not the checkpoint's"
        yield from template_oddities(ours, own, templates_of(theirs), label, fix)
        alone = {name: text for name, text in templates_of(ours).items() if name not in templates_of(theirs)}
        yield from template_oddities(theirs, label, alone, own, fix)


def _lacking(file: ModelFile, name: str, other: str, key: str, value: Any) -> Iterator[Oddity]:
    decides, takes = lacking(file.weights.fields, key, value)
    if decides:
        says = f"is not in {name}: {takes}; {other} has {brief(value)}; convert {name} again"
        yield Oddity(key, says, "tokenizer-key")
    elif decides is None:
        yield Oddity(key, f"is not in {name}; {other} has {brief(value)}", "metadata", certain=False)
