"""Command lines as this system's shells read them: cut into words, and a word quoted for one.

On Windows a backslash is part of a path, and single quotes quote nothing.
"""

from __future__ import annotations

import os
import shlex


def as_windows() -> bool:
    """Whether command lines are read as Windows reads them."""
    return os.name == "nt"


def split_line(line: str) -> list[str]:
    """The words of a line. Raises ValueError for one that no program reads, or that programs read in two ways."""
    if not as_windows():
        return shlex.split(line)
    import mslex  # Windows has no function for it but CommandLineToArgvW, which reads the first word otherwise

    return mslex.split(line, like_cmd=False)


def quote(word: str) -> str:
    """A word as a shell reads it, or cmd.exe; characters that cannot be seen as bash has them, and no other."""
    if as_windows():
        import mslex

        return mslex.quote("".join(each if each.isprintable() else _escape(each) for each in word))
    return shlex.quote(word) if word.isprintable() else "$'" + "".join(map(_escape, word)) + "'"


def _escape(character: str) -> str:
    code = ord(character)
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
