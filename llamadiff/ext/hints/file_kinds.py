"""What a file or a directory is, by its first bytes: no more of it is read, and nothing is opened or executed."""

from __future__ import annotations

import re
import struct
from itertools import islice
from pathlib import Path

from llamadiff.trace.metadata import KEY
from llamadiff.trace.stated import parse_json

MODEL, ARRAY, ARCHIVE, PICKLE = "a GGUF model", "one NumPy array (.npy)", "a NumPy archive (.npz)", "a pickle"
TRACE, WEIGHTS, TENSORS = "a trace", "a checkpoint's weights", "bare tensors (.safetensors)"
CHECKPOINT, ARRAYS, TRACES = "a checkpoint's directory", "a directory of arrays", "a directory of traces"
MODELS, FOLDER = "a directory of GGUF files", "a directory"
SAVED = "tensors that torch.save wrote"
NODES, OP, REPORT = "a run that capture --nodes recorded", "an op that backend --keep saved", "a report of llamadiff's"
PROGRAM = "a program"
EMPTY, SHORT, TEXT = "empty", "a file of less than 8 bytes", "a text file"
OP_KEY = "llamadiff.op"  # among the metadata of a saved op (ext/graph/repro.py)
MOST = 10_000  # files of a directory that are looked at
HEAD, LEAST = 1 << 16, 8  # bytes of a file that are looked at, and that it takes to say what it is
MAX_HEADER = 1 << 23  # bytes of a safetensors header that are parsed
_PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_SAVED = (".pt", ".pth")  # that torch.save writes, an archive with a pickle in it
_MAYBE_PICKLES = (".bin",)  # or raw values
_ARRAYS = (".npy", ".f32", ".f16", ".bf16", ".bin", ".raw")
_BEGINS = {
    b"GGUF": MODEL, b"\x93NUMPY": ARRAY, b"#!": PROGRAM, b"\x7fELF": PROGRAM, b"MZ\x90\0": PROGRAM,
    b"\xcf\xfa\xed\xfe": PROGRAM,
}  # fmt: skip
_PROGRAMS = (".py", ".sh", ".js")
_ZIP = b"PK\x03\x04"
_PROTOCOLS = tuple(b"\x80" + bytes([version]) for version in range(2, 6))
_TEXT = frozenset(b"\t\n\f\r\x1b" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100)))  # UTF-8 has all of these
_STATED = re.compile(
    rb'\s*\{(?:[^{}]{0,4000}\{)?[^{}]{0,4000}?"schema":\s*"llamadiff\.(?:(nodes)/|(?:report|weights|variants)/|extras\.)'
)
_OURS = re.compile(  # how reports begin: CSV, JUnit's XML, Markdown
    rb"tap,layer,op,|tensor,type,shape,|<\?xml [^>]*>\s*<testsuite name=\"llamadiff\"|"
    rb"(### |\*\*)(MATCH|NOISE|WRONG|UNCHECKED)\b"
)
_TITLE = re.compile(rb"<title>[^<]{0,2000}llamadiff</title>")
_NAME = re.compile(rb'"([^"\\]{1,200})"\s*:\s*\{\s*"(?:dtype|shape|data_offsets)"')


def kind_of(path: Path) -> str:
    """What it is, in words; empty where that cannot be seen."""
    try:
        return _kind_of_folder(path) if path.is_dir() else _kind_of_file(path) if path.is_file() else ""
    except OSError:
        return ""


def _kind_of_folder(path: Path) -> str:
    names = [each.name for each in islice(path.iterdir(), MOST)]
    tensors = [name for name in names if name.endswith(".safetensors")]
    if "config.json" in names and tensors:
        return CHECKPOINT
    if tensors:
        return TRACES
    arrays = any(name.endswith(_ARRAYS) for name in names)
    return MODELS if any(name.endswith(".gguf") for name in names) else ARRAYS if arrays else FOLDER


def _kind_of_file(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(HEAD)
    known = next((kind for begin, kind in _BEGINS.items() if head.startswith(begin)), "")
    if known:
        return known
    if head[:4] == _ZIP and _first_entry(head).endswith(b".npy"):
        return ARCHIVE
    if is_pickle(path, head) or path.suffix in _PROGRAMS:
        return PROGRAM if path.suffix in _PROGRAMS else PICKLE
    return _kind_of_tensors(head) if head[8:9] == b"{" and b"\0" in head[:8] else _kind_of_text(head)


def _kind_of_tensors(head: bytes) -> str:
    """What a safetensors file is, by its names."""
    names = _NAME.findall(head)
    weights = bool(names) and all(name.endswith((b".weight", b".bias")) for name in names)
    if f'"{OP_KEY}"'.encode() in head:
        return OP
    return TRACE if f'"{KEY}"'.encode() in head else WEIGHTS if weights else TENSORS if names else ""


def _kind_of_text(head: bytes) -> str:
    """What a file is that is text, or is nothing."""
    stated = _STATED.match(head) if head.lstrip()[:1] == b"{" else None
    if stated is not None:
        return NODES if stated[1] else REPORT
    if _OURS.match(head) or (head[:9] == b"<!doctype" and _TITLE.search(head)):
        return REPORT
    if len(head) < LEAST:
        return SHORT if head else EMPTY
    return TEXT if _TEXT.issuperset(head) else ""


def is_pickle(path: Path, head: bytes = b"") -> bool:
    """Whether it is one by its name, or by that and its first bytes."""
    if path.suffix in _PICKLES:
        return True
    if path.suffix not in _MAYBE_PICKLES:
        return False
    if not head:
        with path.open("rb") as file:
            head = file.read(4)
    return head[:4] == _ZIP or head[:2] in _PROTOCOLS


def is_saved(path: Path) -> bool:
    """Whether it is an archive as torch.save writes it, by its name and its first bytes."""
    if path.suffix not in _SAVED:
        return False
    with path.open("rb") as file:
        return file.read(4) == _ZIP


def _first_entry(head: bytes) -> bytes:
    """The name of a zip file's first entry."""
    size = int.from_bytes(head[26:28], "little")
    return head[30 : 30 + size]


def cut_off(path: Path) -> str:
    """That a safetensors file ends before its tensors do, in bytes; empty for one that does not, or is none."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(9)
            (length,) = struct.unpack("<Q", head[:8].ljust(8, b"\xff"))
            if head[8:] != b"{" or length > MAX_HEADER:
                return ""
            text = head[8:] + file.read(length - 1)
        if len(text) < length:
            return f"{size} of {8 + length} bytes or more"
        ends = [entry["data_offsets"][1] for name, entry in parse_json(text).items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return ""
    return f"{size} of {whole} bytes" if isinstance(whole, int) and size < whole else ""
