"""The command that made a report, as a line that a shell reads back."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

MOST = 2000  # characters; a longer line (of token ids) is not shown


def command_line(command: Sequence[str]) -> str | None:
    """The words of a command on one line; None where there was no command, or it would be too long to show."""
    line = " ".join(_word(word) for word in command)
    return line if 0 < len(line) <= MOST else None


def _word(word: str) -> str:
    """A word as a POSIX shell reads it; where it has characters that cannot be seen, as bash does."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_character, word)) + "'"


def _character(character: str) -> str:
    code = ord(character)
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
