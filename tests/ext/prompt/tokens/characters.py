"""Bytes and characters, as llama.cpp reads them."""

from collections.abc import Iterator


def as_bytes(text: str) -> bytes:
    """A text's UTF-8; the halves U+DC80 to U+DCFF are bytes that are none."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return b"".join(
            c.encode("utf-8", "surrogateescape" if "\udc80" <= c <= "\udcff" else "surrogatepass") for c in text
        )


def as_text(data: bytes) -> str:
    """Characters as llama.cpp reads them: halves and overlong forms too; U+FFFD for each byte that fits nowhere."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(character for character, _ in characters(data))


def characters(data: bytes) -> Iterator[tuple[str, int]]:
    """Characters, and how many bytes each takes."""
    at = 0
    while at < len(data):
        first = data[at]
        size = 1 if first < 0x80 else 0 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
        rest = data[at + 1 : at + size]
        if not size or first > 0xF7 or len(rest) != size - 1 or any(byte & 0xC0 != 0x80 for byte in rest):
            size, code = 1, 0xFFFD
        else:
            code = first & (0x7F >> size if size > 1 else 0x7F)
            for byte in rest:
                code = code << 6 | byte & 0x3F
        at += size
        yield chr(code) if code < 0x110000 else "\ufffd", size


def alphabet(gap: bool = True) -> list[str]:
    """GPT-2's characters for bytes: those that can be seen are themselves."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - ({0xAD} if gap else set())
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


def in_units(text: str) -> str:
    """Each unit of 16 bits by itself: halves of characters are none."""
    units = text.encode("utf-16-le", "surrogatepass")
    return "".join(units[at : at + 2].decode("utf-16-le", "replace") for at in range(0, len(units), 2))


def halved(text: str) -> str:
    """Characters beyond U+FFFF as two halves of three bytes each, NUL in two bytes."""
    return "".join(_halved(c) if c > "\uffff" else "\udcc0\udc80" if c == "\0" else c for c in text)


def _halved(c: str) -> str:
    halves = chr(0xD7C0 + (ord(c) >> 10)) + chr(0xDC00 + (ord(c) & 0x3FF))
    return halves.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
