"""What comes before the first op: the ids of a text, and the prompt of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from pathlib import Path

    from llamadiff.cli.command import Command
    from llamadiff.engines.model_file import ModelFile
    from llamadiff.result.oddity import CheckpointTokenizer


class Prompt(Slice):
    """What comes before the first op: the ids of a text, and the prompt of a conversation."""

    remote = ("llamadiff.ext.prompt.errands",)

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.prompt.cli import COMMANDS

        return COMMANDS

    def tokenizer(self, folder: Path) -> CheckpointTokenizer:
        from llamadiff.ext.prompt.tokens.of_checkpoint import open_tokenizers
        from llamadiff.ext.prompt.tokens.of_file import FileTokenizer

        return FileTokenizer(folder) if folder.is_file() else open_tokenizers(folder)

    def chat_template(self) -> Callable[[ModelFile, str], str]:
        from llamadiff.ext.prompt.chat_template import render

        return render

    def concerns(self, model: ModelFile) -> Iterable[str]:
        from llamadiff.ext.prompt.tokens.concerns import concerns

        return concerns(model)


slice_ = Prompt()
