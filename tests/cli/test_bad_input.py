"""Everything a user, or a hostile file, can get wrong: one line on standard error, exit code 2, nothing left behind.

What is about a process (signals, streams, files that might take it down) is run in one; the rest is in-process.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from command import kill_all_of, processes_of
from command import run as run_here
from holding import hold_llama_cpp
from models import small
from models.gguf_file import write_gguf
from models.tokenized import with_tokenizer
from optional import needs_slices
from safetensors.numpy import save_file
from waiting import HANG, eventually

from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How
from llamadiff.llamacpp.capture import capture
from llamadiff.llamacpp.request import Request
from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import KEY, SCHEMA
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import diff

COMMAND = str(Path(sys.executable).with_name("llamadiff"))
TOKENS = (1, 17, 5)
IDS = ("--tokens", "1,17,5")
SERVE = "llamadiff.llamacpp.child_main"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# -- running the command ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """How a command ended, and what it left: files in its TMPDIR, partial files, processes."""

    code: int
    out: str
    err: str
    left: list[str]

    def refused(self, *words: str) -> None:
        """One clear line, exit code 2, nothing left behind, no fault in the program."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.out == ""
        assert self.err.startswith("llamadiff: ")
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n")
        assert len(self.err) < 1000
        assert "fault in llamadiff" not in self.err
        assert "Traceback" not in self.err
        assert self.err[:-1].isprintable(), self.err
        for word in words:
            assert word in self.err, self.err
        assert not self.left

    def succeeded(self) -> str:
        assert (self.code, self.err, self.left) == (0, "", [])
        return self.out


class Cli:
    """Runs commands in a folder, each with a TMPDIR of its own, which also marks its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self) -> Path:
        """A new TMPDIR."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self.folder / "tmp"))

    def start(
        self, *args: object, cwd: Path | None = None, unset: tuple[str, ...] = (), stdout: int = subprocess.PIPE,
        shell: str = "", **env: str,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Begin a command; ``shell`` is done first, in the same process."""
        place = self.place()
        environment = {**os.environ, "TMPDIR": str(place), **env}
        for name in unset:
            environment.pop(name, None)
        words = [arg if isinstance(arg, bytes) else str(arg).encode("utf-8", "surrogateescape") for arg in args]
        before = ["sh", "-c", f'{shell}; exec "$@"', "sh"] if shell else []
        if shell:  # where there is room for little, Python keeps bytecode that is cut off, and every later run fails
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        child = subprocess.Popen(
            [*before, COMMAND, *words], cwd=cwd or self.folder, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
        )  # fmt: skip
        child.place = place
        return child

    def finish(self, child: subprocess.Popen[bytes]) -> Run:
        try:
            out, err = child.communicate(timeout=HANG)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return Run(child.returncode, (out or b"").decode(), err.decode(), self.left_by(child.place))

    def left_by(self, place: Path) -> list[str]:
        others = [path for path in self.folder.iterdir() if path.name != "tmp"]
        files = [path for other in others for path in (other, *other.rglob("*"))]
        partial = [path.name for path in files if path.suffix == ".part"]
        return [path.name for path in place.iterdir()] + partial + processes_of(place)

    def __call__(self, *args: object, **options: object) -> Run:
        return self.finish(self.start(*args, **options))


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """Commands heed the signals that ask them to stop, even where these tests run under nohup."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    yield Cli(tmp_path)
    for place in tmp_path.glob("tmp/*/"):
        kill_all_of(place)
    for number, handler in before.items():
        signal.signal(number, handler)


# -- files -----------------------------------------------------------------------------------------


def trace_file(path: Path, header: dict[str, object] | bytes, data: bytes = b"") -> Path:
    """A .safetensors file of any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def a_trace(path: Path, info: object = None, **tensors: np.ndarray) -> Path:
    """A trace of three tokens as a stranger writes it, its metadata replaced by ``info``."""
    text = info if isinstance(info, str) else json.dumps({"schema": SCHEMA, "tokens": TOKENS, **(info or {})})
    save_file(tensors or {"embd": np.ones((3, small.EMBD), np.float32)}, path, {KEY: text})
    return path


def section_ends(path: Path) -> tuple[int, int, int]:
    """Where the metadata, the tensor list and the last tensor of a GGUF file end."""
    reader = gguf.GGUFReader(path)
    lists = min(tensor.field.offset for tensor in reader.tensors)
    return lists, reader.data_offset, max(tensor.data_offset + tensor.n_bytes for tensor in reader.tensors)


def header_end(whole: bytes) -> int:
    """Where the header of a .safetensors file ends, its padding left out."""
    return 8 + len(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]].rstrip())


def damaged(whole: bytes, within: int, seed: int) -> bytes:
    """One to four bytes replaced, within the first ``within``."""
    rng = random.Random(seed)
    data = bytearray(whole)
    for _ in range(rng.choice([1, 1, 2, 4])):
        place = rng.randrange(within)
        data[place] = rng.choice([rng.randrange(256), data[place] ^ (1 << rng.randrange(8)), 0, 127, 255])
    return bytes(data)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Good files, and those of every kind of bad file that the cases below name."""
    folder = tmp_path_factory.mktemp("files")
    model = small.write_model(folder / "good.gguf")
    with_tokenizer(folder / "text.gguf")
    for number, template in enumerate(TEMPLATES):
        with_tokenizer(folder / f"template-{number}.gguf", template)
    small.write_model(folder / "aborts.gguf", arch="qwen3", qk_norm=True, extra={"rope.dimension_count": 32})
    small.write_model(folder / "layers.gguf", extra={"block_count": 4_000_000_000})
    small.write_model(folder / "shape.gguf", tensors={"blk.0.attn_q.weight": np.ones((128, 256), np.float32)})
    blocks = np.ones((256, 512 // 256 * 292), np.uint8), gguf.GGMLQuantizationType.Q8_K
    small.write_model(folder / "q8_k.gguf", kind="F32", tensors={"blk.0.ffn_down.weight": blocks})
    small.write_model(folder / "stray.gguf", tensors={"blk.0.stray.weight": np.ones((8, 256), np.float32)})
    write_gguf(folder / "other.gguf", {"tokenizer.ggml.model": "none"}, arch="ge\x1b[31mmma")
    write_gguf(folder / "vocabulary.gguf", {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b"]})
    (folder / "notes.txt").write_text("hello there", encoding="utf-8")
    (folder / "empty.gguf").touch()
    (folder / "binary.ids").write_bytes(bytes(range(128, 256)))
    (folder / "cut.gguf").write_bytes(model.read_bytes()[:-5000])
    os.mkfifo(folder / "pipe")
    (folder / "digits").mkdir()
    (folder / "digits" / "embd.txt").write_text("1" * 100_000 + "x", encoding="utf-8")
    (folder / "long.ids").write_text("1 " * (9 << 20), encoding="utf-8")
    capture(Request(str(model), tokens=TOKENS, output=str(folder / "good.safetensors"),
                    model_info={"file": "good.gguf"}))  # fmt: skip
    _write_traces(folder)
    _write_tolerances(folder)
    for name in DAMAGED:
        source, seed = ("text.gguf" if name.endswith("gguf") else "good.safetensors"), int(name.split(".")[0])
        whole = (folder / source).read_bytes()
        within = section_ends(folder / source)[seed % 3] if name.endswith("gguf") else header_end(whole)
        (folder / name).write_bytes(damaged(whole, within, 1000 + seed))
    return SimpleNamespace(folder=folder, model=model, trace=folder / "good.safetensors")


def _write_traces(folder: Path) -> None:
    rows = np.ones((3, small.EMBD), np.float32)
    a_trace(folder / "others.safetensors", {"model": {"sha256": "ab" * 32}})
    a_trace(folder / "tokens.safetensors", {"tokens": [1, 17, 6]})
    a_trace(folder / "shape.safetensors", embd=rows[:, :7])
    a_trace(folder / "words.safetensors", "{not JSON")
    save_file({"embd": rows}, folder / "bare.safetensors")
    a_trace(folder / "none.safetensors", **{"my own name": rows})
    a_trace(folder / "cache.safetensors", {"producer": {"settings": {"type_k": "Q8_K"}}})
    a_trace(folder / "many.safetensors", {"tokens": [1] * 300}, embd=np.ones((300, small.EMBD), np.float32))
    a_trace(folder / "odd.safetensors", {"tokens": [1, 17, 95]})
    a_trace(folder / "id.safetensors", {"tokens": [1, 2, 96]})
    a_trace(folder / "positions.safetensors", {"positions": [0, 1, 3]})
    whole = (folder / "good.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[:-1])
    (folder / "short.safetensors").write_bytes(whole[:20])


def _write_tolerances(folder: Path) -> None:
    for name, text in {
        "words": "this is no TOML", "keys": "[[rule]]\nmatch = 1e-9\ncolour = 'red'", "type": "[[rule]]\nmatch = 'x'",
        "table": "[rule]\nmatch = 1", "nan": "[[rule]]\nmatch = nan", "minus": "[[rule]]\nmatch = -1.0",
        "nomatch": "[[rule]]\ntap = '*'", "more": "x = 1", "deep": "x = " + "[" * 5000,
        "huge": f"[[rule]]\nmatch = {9**500}",
    }.items():  # fmt: skip
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")


# -- what is refused -------------------------------------------------------------------------------

COMPARE = ("compare", "good.gguf", *IDS)
OWN = ("--candidate", "good.safetensors")
DIFF = ("diff", "good.safetensors", "good.safetensors")

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# A chat template -> what the one line must say.
TEMPLATES = {
    ENDLESS: ("the chat template takes more than 2 s", "leave out --chat"),
    "{{ raise_exception('[red]no\x1b[2J\nway') }}": (r"[red]no\x1b[2J way",),
    "{{ '\\ud800' }}": ("not valid Unicode",),
    "{# nothing #}": ("the chat template wrote nothing",),
}
# What is typed -> what the one line must say.
REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "missing file": (("compare", "no.gguf", "hi"), ("no.gguf: no such file",)),
    "a directory": (("compare", ".", "hi"), ("is a directory", "give the .gguf file")),
    "not a GGUF": (("compare", "notes.txt", "hi"), ("notes.txt: ", "GGUF file")),
    "an empty file": (("taps", "empty.gguf"), ("empty.gguf: ", "GGUF file")),
    "a pipe for a model": (("taps", "pipe"), ("pipe: is not a regular file",)),
    "a cut model": (("compare", "cut.gguf", *IDS), ("cut.gguf: damaged or truncated", "it ends at byte")),
    "llama.cpp aborts": (("compare", "aborts.gguf", *IDS), ("SIGABRT", "GGML_ASSERT(n_embd_head == n_rot)")),
    "weights only for sums": (("compare", "q8_k.gguf", *IDS), ("q8_k.gguf", "llama.cpp")),
    "llama.cpp refuses": (("compare", "stray.gguf", *IDS), ("stray.gguf", "cannot load", "wrong number of tensors")),
    "unknown to llama.cpp": (("compare", "other.gguf", "hi"), ("unknown model architecture", r"ge\x1b[31mmma")),
    "unknown architecture": (("compare", "other.gguf", "hi", "--engine", "numpy"), ("llama, ",)),
    "vocabulary only": (("compare", "vocabulary.gguf", "hi"), ("vocabulary.gguf", "holds a vocabulary")),
    "too many layers": (("taps", "layers.gguf"), ("block_count = 4000000000", "2 layers")),
    "a weight's shape": (("compare", "shape.gguf", *IDS), ("blk.0.attn_q.weight", "[256, 256]")),
    "no prompt": (("compare", "good.gguf"), ("the prompt is missing", "--tokens")),
    "empty prompt": (("compare", "good.gguf", ""), ("PROMPT|TRACE is empty",)),
    "prompt and ids": ((*COMPARE, "hi"), ("a prompt or --tokens, not both",)),
    "ids twice": ((*COMPARE, "--tokens", "@notes.txt"), ("notes.txt: \"hello\"",)),
    "prompt of stray bytes": (("compare", "text.gguf", "a\udcff"), ("not valid Unicode", "--tokens")),
    "letters it lacks": (
        ("compare", "text.gguf", "Ab\u00e9c \u4e2dA"),
        ('no token for "A" (U+0041), "\u00e9" (U+00E9), "\u4e2d" (U+4E2D), nor tokens for', "leave these out"),
    ),
    "no tokenizer": (("compare", "good.gguf", "hi"), ("good.gguf: the file has no tokenizer", "--tokens")),
    "id out of range": (("compare", "good.gguf", "--tokens", "1,96"), ("id 96 is out of range", "96 entries")),
    "huge id": (("compare", "good.gguf", "--tokens", "9" * 5000), ("is not a token id",)),
    "negative id": (("compare", "good.gguf", "--tokens", "1,-2"), ('"-2" is not a token id', "1,15043")),
    "no id": (("compare", "good.gguf", "--tokens", " , "), ("no token ids given",)),
    "a word for an id": (("compare", "good.gguf", "--tokens", "1,\u00b2"), ('" is not a token id',)),
    "past the context": ((*COMPARE, "--n-predict", "254"), ("257 tokens", "context of 256")),
    "ids file missing": (("compare", "good.gguf", "--tokens", "@no.ids"), ("no.ids: cannot be read",)),
    "ids file binary": (("compare", "good.gguf", "--tokens", "@binary.ids"), ("binary.ids: is not text",)),
    "ids file of words": (("compare", "good.gguf", "--tokens", "@notes.txt"), ('notes.txt: "hello"',)),
    "ids file endless": (("compare", "good.gguf", "--tokens", "@/dev/zero"), ("/dev/zero: is a device, no",)),
    "ids file a directory": (("compare", "good.gguf", "--tokens", "@."), ("is a directory, no regular file",)),
    "ids file a pipe": (("compare", "good.gguf", "--tokens", "@pipe"), ("pipe: is a pipe that nobody writes to",)),
    "ids file too long": (("compare", "good.gguf", "--tokens", "@long.ids"), ("long.ids: more than 16 MiB",)),
    "layers of words": ((*COMPARE, "--only", "all"), ("no tap fits --only all",)),
    "layers backwards": ((*COMPARE, "--only", "1-0"), ("--only 1-0",)),
    "layers of odd digits": ((*COMPARE, "--only", "\u00b2"), ("no tap fits --only ",)),
    "layers beyond": ((*COMPARE, "--only", "1-7"), ("--only 1-7", "layers 0 to 1")),
    "taps of nothing": ((*COMPARE, "--only", "l_out-*", "--only", "zzz"), ("no tap fits --only zzz",)),
    "taps elsewhere": ((*COMPARE, "--only", "l_out-0", "--only", "1"), ("no tap of these layers",)),
    "cache of words": ((*COMPARE, "--llama-cpp", "kv=f17"), ("--llama-cpp kv=f17", "f32, f16")),
    "cache llama.cpp refuses": ((*COMPARE, "--llama-cpp", "kv=q8_0"), ("quantized V cache requires flash_attn",)),
    "precision": ((*COMPARE, "--engine", "numpy:f8"), ("--engine numpy:f8", "numpy, numpy:f64, graph")),
    "fail-on": ((*COMPARE, "--fail-on", "all"), ("--fail-on all", "wrong, noise, never")),
    "threads": ((*COMPARE, "--llama-cpp", "threads=100000"), ("--llama-cpp", "threads=100000")),
    "n-predict": ((*COMPARE, "--n-predict", "many"), ("--n-predict", "many")),
    "unknown option": ((*COMPARE, "--colour"), ("--colour", "--help")),
    "unknown command": (("compair",), ("compair", "--help")),
    "missing argument": (("compare",), ("MODEL", "--help")),
    "a prompt without quotes": (("compare", "good.gguf", "Once", "upon", "a"), ("upon a", "--help")),
    "chat without prompt": ((*COMPARE, "--chat"), ("--chat needs a prompt",)),
    "chat without template": (("compare", "text.gguf", "hi", "--chat"), ("no chat template", "leave out --chat")),
    "candidate of nothing": ((*COMPARE, "--candidate", "no-such"), ("--candidate no-such",)),
    "candidate no trace": ((*COMPARE, "--candidate", "cut.safetensors"), ("cut.safetensors: ",)),
    "candidate of other tokens": ((*COMPARE, "--candidate", "tokens.safetensors"), ("other tokens", "[6", "[5")),
    "candidate of an odd token": (
        ("compare", "text.gguf", *IDS, "--candidate", "odd.safetensors"), ("other tokens", r'[95 "\x1b[2J[red]x"]')),
    "candidate without metadata": (
        ("compare", "good.gguf", "--candidate", "bare.safetensors"), ("bare.safetensors: no 'llamadiff'", "--tokens")),
    "candidate of other metadata": (
        ("compare", "good.gguf", "--candidate", "words.safetensors"), ("words.safetensors", "metadata is not JSON")),
    "candidate cut": (("compare", "good.gguf", "--candidate", "cut.safetensors"), ("cut.safetensors: ",)),
    "candidate of words": (
        ("compare", "good.gguf", "--candidate", "notes.txt"), ("notes.txt: the log states no token ids",)),
    "json a directory": ((*DIFF, "-o", "json:."), ("is a directory",)),
    "json in a file": ((*DIFF, "-o", "json:notes.txt/r.json"), ("cannot be written",)),
    "save in a file": ((*COMPARE, "-o", "notes.txt/kept/"), ("notes.txt/kept: cannot be made",)),
    "save on a file": ((*COMPARE, "-o", "notes.txt/"), ("notes.txt: cannot be made",)),
    "output nowhere": (("capture", "good.gguf", *IDS, "-o", "notes.txt/t.st"), ("notes.txt/t.st: cannot be written",)),
    "output a directory": (("capture", "good.gguf", *IDS, "-o", "."), ("is a directory",)),
    "output a device": (("capture", "good.gguf", *IDS, "-o", "pipe"), ("pipe: is not a regular file",)),
    "output the model": (("capture", "good.gguf", *IDS, "-o", "good.gguf"), ("good.gguf is the model",)),
    "json the trace": ((*DIFF, "-o", "json:./good.safetensors"), ("good.safetensors is the baseline", "another name")),
    "one report over the other": ((*DIFF, "-o", "json:r.txt", "-o", "csv:r.txt"), ("r.txt is what -o writes",)),
    "output the ids": (
        ("capture", "good.gguf", "--tokens", "@notes.txt", "-o", "notes.txt"), ("notes.txt is the tokens file",)),
    "json the model": (("diff", "good.safetensors", "good.safetensors", "-o", "json:good.gguf"), ("is a model",)),
    "tolerance missing": ((*DIFF, "--tolerance", "no.toml"), ("no.toml: cannot be read",)),
    "tolerance a directory": ((*DIFF, "--tolerance", "."), ("is a directory, no regular file",)),
    "tolerance endless": ((*DIFF, "--tolerance", "/dev/zero"), ("/dev/zero: is a device, no regular file",)),
    "tolerance a pipe": ((*DIFF, "--tolerance", "pipe"), ("pipe: is a pipe that nobody writes to",)),
    "map endless": ((*COMPARE, *OWN, "--map", "/dev/zero"), ("/dev/zero: is a device, no regular file",)),
    "map a pipe": ((*COMPARE, *OWN, "--map", "pipe"), ("pipe: is a pipe that nobody writes to",)),
    "candidate a pipe": ((*COMPARE, "--candidate", "pipe"), ("pipe: is a pipe, no regular file",)),
    "candidate endless": ((*COMPARE, "--candidate", "/dev/zero"), ("/dev/zero: is a device, no regular file",)),
    "candidate of transformers a pipe": (
        (*COMPARE, "--candidate", "transformers:pipe@f32"), ("pipe: is a pipe, no regular file",)),
    "text of one long number": ((*COMPARE, "--candidate", "digits"), ("embd.txt:1: a line of more than 1000 bytes",)),
    "tolerance of words": ((*DIFF, "--tolerance", "words.toml"), ("words.toml: not TOML",)),
    "tolerance keys": ((*DIFF, "--tolerance", "keys.toml"), ("colour is no key of rule[0]", "arithmetic")),
    "tolerance type": ((*DIFF, "--tolerance", "type.toml"), ("rule[0].match is 'x'; expected a number;",)),
    "tolerance table": ((*DIFF, "--tolerance", "table.toml"), ("[[rule]] entries",)),
    "tolerance nan": ((*DIFF, "--tolerance", "nan.toml"), ("match is nan; expected a number >= 0.0",)),
    "tolerance negative": ((*DIFF, "--tolerance", "minus.toml"), ("match is -1.0; expected a number >= 0.0",)),
    "tolerance huge": ((*DIFF, "--tolerance", "huge.toml"), ("rule[0].match is ",)),
    "tolerance no match": ((*DIFF, "--tolerance", "nomatch.toml"), ("rule[0] has no key match",)),
    "tolerance more": ((*DIFF, "--tolerance", "more.toml"), ("[[rule]] entries",)),
    "tolerance deep": ((*DIFF, "--tolerance", "deep.toml"), ("deep.toml: not TOML",)),
    "trace missing": (("diff", "no.safetensors", "no.safetensors"), ("no.safetensors: no such trace",)),
    "trace a directory": (("diff", ".", "."), ("is a directory",)),
    "trace a pipe": (("diff", "pipe", "good.safetensors"), ("pipe: is a pipe, no regular file",)),
    "trace a model": (("diff", "good.gguf", "good.safetensors"), ("good.gguf: ",)),
    "trace cut": (("diff", "good.safetensors", "cut.safetensors"), ("cut.safetensors: ",)),
    "trace cut short": (("check", "short.safetensors"), ("short.safetensors: ",)),
    "trace of another model": (("check", "others.safetensors", "--model", "good.gguf"), ("ab" * 6, " is another (")),
    "traces of two models": (("diff", "good.safetensors", "others.safetensors"), ("ab" * 6, "sha256")),
    "traces of other tokens": (("diff", "good.safetensors", "tokens.safetensors"), ("other tokens", "[6", "[5")),
    "traces of other positions": (("diff", "good.safetensors", "positions.safetensors"), ("[0, 1, 3]", "[0, 1, 2]")),
    "trace of no model": (("check", "tokens.safetensors"), ("(unnamed)", "--model")),
    "trace of a shape": (("check", "shape.safetensors", "--model", "good.gguf"), ("embd", "[3, 7]", "[3, 256]")),
    "traces of two shapes": (("diff", "good.safetensors", "shape.safetensors"), ("embd", "[3, 256]", "[3, 7]")),
    "trace past the context": (("check", "many.safetensors", "--model", "good.gguf"), ("300 tokens", "256")),
    "trace of an odd cache": (("check", "cache.safetensors", "--model", "good.gguf"), ("Q8_K", "F32, F16")),
    "trace of an odd id": (("check", "id.safetensors", "--model", "good.gguf"), ("id 96 is out of range",)),
    "no trace in a directory": (("check", "tmp"), ("tmp: no .safetensors trace",)),
    **{f"template {n}": (("compare", f"template-{n}.gguf", "hello", "--chat"), words)
       for n, words in enumerate(TEMPLATES.values())},
    "markup and control characters": (("taps", "[bold]\x1b[2J\n\u202e.gguf"), (r"[bold]\x1b[2J\n\u", ".gguf: no")),
}  # fmt: skip


# Files with bytes replaced: what becomes of them is open, how the command ends is not.
DAMAGED = {f"{seed}.gguf": ("compare", f"{seed}.gguf", *IDS) for seed in range(18)} | {
    f"{seed}.safetensors": ("diff", "good.safetensors", f"{seed}.safetensors", "--model", "good.gguf")
    for seed in range(9)
}


@pytest.fixture
def here(files: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """A command in this process, among the files, with a TMPDIR of its own."""

    def run(*args: str) -> Run:
        cli = Cli(files.folder)
        place = cli.place()
        monkeypatch.setenv("TMPDIR", str(place))
        monkeypatch.chdir(files.folder)
        done = run_here(*args)
        return Run(done.returncode, done.stdout, done.stderr, cli.left_by(place))

    return run


OF_SLICES = {
    "candidate of words": "dumps",
    "candidate of transformers a pipe": "pytorch",
    "chat without template": "prompt",
    "unknown to llama.cpp": "graph",
    **{f"template {n}": "prompt" for n in range(len(TEMPLATES))},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_slices(*filter(None, [OF_SLICES.get(name)]))]) for name in REFUSED]
)
def test_refused_in_one_line(name: str, here: Callable[..., Run]) -> None:
    args, words = REFUSED[name]
    here(*args).refused(*words)


# of each way to be refused one: by the command line, a file, llama.cpp, its death, a limit, an output, foreign letters
BY_PROCESSES = (
    "unknown option", "a cut model", "llama.cpp refuses", "llama.cpp aborts", "ids file endless",
    "prompt of stray bytes", "markup and control characters", "tolerance a pipe",
)  # fmt: skip


@pytest.mark.parametrize("name", BY_PROCESSES)
def test_a_process_refuses_in_one_line(name: str, files: SimpleNamespace) -> None:
    args, words = REFUSED[name]
    Cli(files.folder)(*args).refused(*words)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_read_or_refused(name: str, here: Callable[..., Run]) -> None:
    run = here(*DAMAGED[name])
    if run.code == 2 and run.err:
        run.refused()
    else:
        assert run.code in (0, 1, 2)
        assert run.out.startswith(("MATCH", "NOISE", "WRONG", "UNCHECKED"))
        assert (run.err, run.left) == ("", [])


# -- damaged models --------------------------------------------------------------------------------


def test_a_model_cut_anywhere_is_refused(files: SimpleNamespace, tmp_path: Path) -> None:
    whole = files.model.read_bytes()
    lists, start, end = section_ends(files.model)
    bounds = [(0, 24), (24, lists), (lists, start), (start, end)]
    cuts = {int(cut) for first, last in bounds for cut in np.linspace(first, last - 1, 15)}
    assert len(cuts) == 4 * 15
    for cut in cuts:
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"no GGUF|not a GGUF|damaged or truncated GGUF file \(it ends at byte"):
            Model(tmp_path / "cut.gguf")


def hostile(whole: bytes, place: int, form: str, *values: int) -> bytes:
    return whole[:place] + struct.pack(form, *values) + whole[place + struct.calcsize(form) :]


@pytest.mark.parametrize(
    ("key", "skip", "form", "value", "message"),
    [
        ("GGUF.tensor_count", 0, "<Q", 1 << 60, "claims 1152921504606846976 tensors"),
        ("GGUF.kv_count", 0, "<Q", 1 << 60, "1152921504606846976 metadata keys"),
        ("tokenizer.ggml.token_type", 8 + 25 + 4 + 4, "<Q", 1 << 40, "claims 1099511627776 values"),
        ("tokenizer.ggml.token_type", 8 + 25 + 4 + 4, "<Q", 1 << 20, "it ends at byte"),
        ("llama.block_count", 8 + 17 + 4, "<I", (1 << 32) - 1, "block_count = 4294967295"),
        ("llama.attention.key_length", 8 + 26 + 4, "<I", 1 << 31, "the metadata implies"),
        ("llama.attention.head_count", 8 + 26 + 4, "<I", 0, "expected at least 1"),
        ("tokenizer.ggml.tokens", 8 + 21 + 4 + 4 + 8 + 8, "<B", 0xFF, "tokenizer.ggml.tokens cannot be read"),
    ],
)
def test_a_count_that_lies_is_refused_at_once(
    key: str, skip: int, form: str, value: int, message: str, files: SimpleNamespace, tmp_path: Path
) -> None:
    source = files.folder / "text.gguf"
    path = tmp_path / "m.gguf"
    path.write_bytes(hostile(source.read_bytes(), gguf.GGUFReader(source).fields[key].offset + skip, form, value))
    with pytest.raises(UserError, match=message):  # or it counts for hours, or takes all memory
        Model(path)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    small.write_model(tmp_path / "m.gguf", qk_norm=True)
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole.replace(b"blk.1.ffn_up", b"blk.1.ffn_ap"))
    with pytest.raises(UserError, match=r"m\.gguf: tensor blk\.1\.ffn_up\.weight is missing"):
        Model(tmp_path / "m.gguf")


# -- damaged traces --------------------------------------------------------------------------------


def test_a_trace_cut_anywhere_is_refused(files: SimpleNamespace, tmp_path: Path) -> None:
    whole = files.trace.read_bytes()
    for cut in [*range(0, 16), *np.linspace(16, len(whole) - 1, 50).astype(int)]:
        (tmp_path / "t.safetensors").write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"t\.safetensors: (not a readable trace|is cut off, |is .*, no trace)"):
            Trace.open(tmp_path / "t.safetensors")


INFO = {KEY: json.dumps({"schema": SCHEMA, "tokens": TOKENS})}
ROWS = {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"", b""),
        (b"{", b""),
        (b"[]", b""),
        (b"\xff\xfe", b""),
        (b"[" * 100_000, b""),
        ({"__metadata__": 5}, b""),
        ({"__metadata__": INFO, "embd": 7}, b""),
        ({"__metadata__": INFO, "embd": {"dtype": "F32"}}, b""),
        ({"__metadata__": INFO, "embd": {**ROWS, "shape": [3, -2]}}, bytes(24)),
        ({"__metadata__": INFO, "embd": {**ROWS, "shape": [1 << 62, 1 << 62]}}, bytes(24)),
        ({"__metadata__": INFO, "embd": {**ROWS, "shape": [3, 3]}}, bytes(24)),
        ({"__metadata__": INFO, "embd": {**ROWS, "data_offsets": [0, 1 << 60]}}, bytes(24)),
        ({"__metadata__": INFO, "embd": {**ROWS, "data_offsets": [24, 0]}}, bytes(24)),
        ({"__metadata__": INFO, "embd": {**ROWS, "data_offsets": [-24, 0]}}, bytes(24)),
        ({"__metadata__": INFO, "embd": {**ROWS, "data_offsets": [8, 32]}}, bytes(32)),
        ({"__metadata__": INFO, "embd": ROWS, "l_out-0": ROWS}, bytes(24)),
        ({"__metadata__": INFO, "embd": ROWS, "l_out-0": {**ROWS, "data_offsets": [12, 36]}}, bytes(36)),
        ({"__metadata__": INFO, "embd": {**ROWS, "dtype": "BOOL", "data_offsets": [0, 6]}}, bytes(6)),
        ({"__metadata__": INFO, "embd": {**ROWS, "dtype": "F99"}}, bytes(24)),
        ({"__metadata__": INFO, "embd": {**ROWS, "shape": [3, 0], "data_offsets": [0, 0]}}, b""),
        ({"__metadata__": INFO, "embd": {**ROWS, "shape": [], "data_offsets": [0, 4]}}, bytes(4)),
        ({"__metadata__": INFO, "embd": {**ROWS, "shape": [1] * 70 + [6]}}, bytes(24)),
        ({"embd": ROWS}, bytes(24)),
        (
            f'{{"__metadata__":{json.dumps(INFO)},"embd":{json.dumps(ROWS)},"embd":{json.dumps(ROWS)}}}'.encode(),
            bytes(24),
        ),
    ],
    ids=str,
)
def test_a_trace_with_a_bad_header_is_refused(header: dict[str, object] | bytes, data: bytes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"t\.safetensors: .") as caught:
        Trace.open(trace_file(tmp_path / "t.safetensors", header, data))
    assert len(str(caught.value).splitlines()) == 1


NESTED: list[object] = []
for _ in range(60):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("no JSON", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("5", "schema is 5"),
        ('{"schema": 1, "schema": 2}', "two entries are called schema"),
        ({"schema": "llamadiff.trace/9"}, "llamadiff.trace/9"),
        ({"schema": NESTED}, "nested too deep"),
        ({"tokens": "abc"}, "metadata: tokens is 'abc'"),
        ({"tokens": 5}, "metadata: tokens is 5"),
        ({"tokens": None}, "no tokens"),
        ({"tokens": [1, 2.5, 3]}, r"tokens\[1\] is 2.5; expected a whole number;"),
        ({"tokens": [1, True, 3]}, r"tokens\[1\] is True; expected a whole number;"),
        ({"tokens": [1, -2, 3]}, "a whole number >= 0"),
        ({"tokens": [1, 1 << 40, 3]}, "a whole number <= 2147483647"),
        ({"positions": [0, 1]}, "2 positions for 3 tokens"),
        ({"positions": []}, "0 positions for 3 tokens"),
        ({"positions": {"0": 1}}, "metadata: positions"),
        ({"positions": [0, 1, 1 << 40]}, "metadata: positions"),
        ({"producer": {"huge": 10**4000}}, "does not fit into 64 bits"),
        ({"n_prefill": -1}, "n_prefill = -1"),
        ({"n_prefill": 0}, "n_prefill = 0"),
        ({"n_prefill": 4}, "n_prefill = 4"),
        ({"n_prefill": True}, "metadata: n_prefill is True"),
        ({"n_prefill": "3"}, "metadata: n_prefill is '3'"),
        ({"prompt": 7}, "metadata: prompt is 7"),
        ({"producer": []}, "metadata: producer is \\[\\]"),
        ({"producer": "me"}, "metadata: producer is 'me'"),
        ({"producer": {"name": 7}}, "metadata: producer.name is 7"),
        ({"producer": {"name": {}}}, "producer.name"),
        ({"producer": {"version": [1]}}, "producer.version"),
        ({"producer": {"settings": 5}}, "metadata: producer.settings is 5"),
        ({"producer": {"settings": {"type_k": 1}}}, "producer.settings.type_k"),
        ({"producer": {"settings": {"flash_attn": "no"}}}, "true or false"),
        ({"producer": {"weights_read": 5}}, "producer.weights_read"),
        ({"producer": {"weights_read": [[1]]}}, r"weights_read\[0\] is \[1\]; expected text"),
        ({"producer": {"deep": NESTED}}, "nested too deep"),
        ({"model": []}, "metadata: model is \\[\\]"),
        ({"model": {"sha256": 7}}, "metadata: model.sha256 is 7"),
        ({"model": {"file": ["x"]}}, "model.file"),
        ({"model": {"architecture": 1}}, "model.architecture"),
    ],
    ids=str,
)
def test_metadata_of_the_wrong_kind_is_refused(info: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Trace.open(a_trace(tmp_path / "t.safetensors", info))
    assert str(caught.value).startswith(str(tmp_path / "t.safetensors"))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "info",
    [
        {"producer": None, "model": None, "positions": None, "prompt": None, "n_prefill": None},
        {"producer": {"name": None, "settings": None, "weights_read": None}, "model": {"sha256": None}},
        {"producer": {"name": "\x1b[2J[red]\ud800", "version": "1", "odd": float("nan")}},
        {"prompt": "\ud800", "unheard": [1, {"of": None}]},
    ],
    ids=str,
)
def test_odd_but_legal_metadata_is_shown_escaped(info: object, tmp_path: Path, cli: Cli) -> None:
    path = a_trace(tmp_path / "t.safetensors", info)
    if "odd" in str(info):
        assert json.loads(cli("diff", path, path, "--partial", "-o", "json:-").succeeded())["verdict"] == "match"
        assert "\x1b" not in cli("diff", path, path, "--partial").succeeded()
    else:
        assert diff(path, path, how=How(partial=True)).verdict == "match"


def test_a_trace_without_taps_cannot_be_judged(files: SimpleNamespace, tmp_path: Path) -> None:
    trace_file(tmp_path / "t.safetensors", {"__metadata__": INFO})
    for model in (None, files.model):
        assert diff(tmp_path / "t.safetensors", tmp_path / "t.safetensors", model).verdict == "unchecked"


def test_tensors_that_are_no_taps_do_no_harm(files: SimpleNamespace, tmp_path: Path) -> None:
    baseline = Trace.open(files.trace)
    others = {"mine": np.ones(3, bool), "l_out": np.ones((2, 2)), "embd-0": np.zeros((0, 3)), "x" * 300: np.ones(1)}
    path = a_trace(
        tmp_path / "t.safetensors", None, **{**{name: np.array(baseline[name]) for name in baseline}, **others}
    )
    assert diff(files.trace, path).verdict == "match"
    assert diff(files.trace, path, files.model).verdict == "match"


def test_values_that_are_not_finite_are_no_accident(files: SimpleNamespace, tmp_path: Path, cli: Cli) -> None:
    baseline = {name: np.array(array) for name, array in Trace.open(files.trace).items()}
    baseline["l_out-0"][1] = np.nan
    baseline["ffn_up-1"][:] = np.float32(3e38)
    run = cli("diff", files.trace, a_trace(tmp_path / "t.safetensors", None, **baseline), "--model", files.model)
    assert (run.code, run.err) == (1, "")
    assert "l_out-0" in run.out


def test_a_trace_of_many_taps_needs_few_descriptors(tmp_path: Path, cli: Cli) -> None:
    path = a_trace(tmp_path / "t.safetensors", None, **{f"l_out-{i}": np.ones((3, 2), np.float32) for i in range(500)})
    run = cli("diff", path, path, "--partial", "-o", "json:-", shell="ulimit -n 100")
    assert len(json.loads(run.succeeded())["taps"]) == 500


# -- files that cannot be written ------------------------------------------------------------------


def test_a_full_disk_while_llama_cpp_runs(files: SimpleNamespace, cli: Cli) -> None:
    for command in (("capture", "-o", cli.folder / "t.safetensors"), ("compare", "-o", "kept/here/"), ("compare",)):
        run = cli(*command, files.model, *IDS, shell="ulimit -f 200")
        run.refused("cannot be written", "File too large", ".safetensors")
    assert not [path for path in cli.folder.iterdir() if path.name != "tmp"]


def test_a_full_disk_while_a_report_is_written(files: SimpleNamespace, cli: Cli) -> None:
    there = '{"schema": "llamadiff.report/1"}'
    (cli.folder / "r.json").write_text(there, encoding="utf-8")
    for name in ("r.json", "r.csv"):
        run = cli("diff", files.trace, files.trace, "-o", name, shell="ulimit -f 2")
        run.refused(f"{name}: cannot be written", "File too large")
    assert [path.name for path in cli.folder.iterdir() if path.name != "tmp"] == ["r.json"]
    assert (cli.folder / "r.json").read_text("utf-8") == there


def test_a_full_disk_behind_standard_output(files: SimpleNamespace, cli: Cli) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        for arguments in (("taps", files.model), ("diff", files.trace, files.trace, "-o", "json:-")):
            cli(*arguments, stdout=full.fileno()).refused("standard output: No space left")


def test_a_reader_that_is_gone(files: SimpleNamespace, cli: Cli) -> None:
    for arguments in (("taps", files.model), ("diff", files.trace, files.trace), ("--help",)):
        reader, writer = os.pipe()
        os.close(reader)
        run = cli(*arguments, stdout=writer)
        os.close(writer)
        assert (run.code, run.err, run.left) == (-signal.SIGPIPE, "", [])


@pytest.mark.parametrize("closed", ["exec 1>&-", "exec 2>&-", "exec 0>&- 1>&- 2>&-"])
def test_streams_that_are_closed(closed: str, files: SimpleNamespace, cli: Cli) -> None:
    run = cli("compare", files.model, *IDS, "-o", "kept/", shell=closed)
    assert (run.code, run.err, run.left) == (0, "", [])
    assert run.out.startswith("MATCH") == ("1>&-" not in closed)
    assert Trace.open(cli.folder / "kept" / "baseline.safetensors").info.tokens == TOKENS


def test_a_temporary_directory_that_is_none(files: SimpleNamespace, cli: Cli) -> None:
    child = cli.start("compare", files.model, *IDS, TMPDIR="/no/such/place")
    out, err = child.communicate(timeout=HANG)
    Run(child.returncode, out.decode(), err.decode(), []).refused("/no/such/place: cannot be written", "set TMPDIR")


def test_a_link_is_written_through(files: SimpleNamespace, cli: Cli) -> None:
    (cli.folder / "r.json").symlink_to("real.json")
    cli("diff", files.trace, files.trace, "-o", "json:r.json").succeeded()
    assert (cli.folder / "r.json").is_symlink()
    assert json.loads((cli.folder / "real.json").read_text("utf-8"))["verdict"] == "match"


# -- llama.cpp missing, dying, or interrupted ------------------------------------------------------

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"llama_cpp", "mineru_llama_cpp", "xllamacpp"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(params=["broken", "missing"])
def without_llama_cpp(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """An environment in which llama_cpp cannot be imported, and what is to be said of it."""
    if request.param == "broken":
        (tmp_path / "path" / "llama_cpp").mkdir(parents=True)
        (tmp_path / "path" / "llama_cpp" / "__init__.py").touch()
        (tmp_path / "path" / "llama_cpp" / "llama_cpp.py").write_text(
            "raise ImportError('libgomp.so.1 is missing')", encoding="utf-8"
        )
        words = ("cannot be loaded", "ImportError: libgomp.so.1 is missing", "pip install --force-reinstall")
    else:
        (tmp_path / "path").mkdir()
        (tmp_path / "path" / "sitecustomize.py").write_text(BLOCKED, encoding="utf-8")
        words = ("no llama.cpp is installed", "no baseline", "'llama-cpp-python>=")
    return {"PYTHONPATH": str(tmp_path / "path")}, words


def test_without_llama_cpp(without_llama_cpp: tuple[dict[str, str], tuple[str, ...]], files: SimpleNamespace, cli: Cli):
    environment, words = without_llama_cpp
    for command in (("compare",), ("capture", "-o", "t.safetensors")):
        cli(*command, files.model, *IDS, **environment).refused(*words)
    for command in (
        ("check", files.trace, "--model", files.model),
        ("diff", files.trace, files.trace),
        ("taps", files.model),
    ):
        assert cli(*command, **environment).succeeded()
    run = cli("doctor", **environment)
    assert (run.code, run.err, run.left) == (2, "", [])
    assert words[0] in run.out


def working(cli: Cli, model: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A command in the middle of a run, and the process of its llama.cpp, which stays there."""
    mark = cli.folder / "tmp" / "held"
    (cli.folder / "tmp").mkdir(exist_ok=True)
    hold = hold_llama_cpp(cli.folder / "tmp" / "path", mark)
    child = cli.start("capture", model, *IDS, "--n-predict", "3", "-o", "t.safetensors", **hold)
    eventually(lambda: mark.exists() and list(cli.folder.glob(".t.safetensors.*.part")), child)
    (worker,) = processes_of(child.place, SERVE)
    return child, int(worker.split()[0])


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "killed by signal 9 (SIGKILL), perhaps by the system, for want of memory"),
        (signal.SIGTERM, "killed by signal 15 (SIGTERM), from outside"),
        (signal.SIGUSR1, "killed by signal 10 (SIGUSR1), from outside"),
    ],
)
def test_llama_cpp_is_killed(number: signal.Signals, words: str, files: SimpleNamespace, cli: Cli) -> None:
    child, worker = working(cli, files.model)
    os.kill(worker, number)
    run = cli.finish(child)
    run.refused(f"good.gguf: llama.cpp's process was {words}")
    assert "fault" not in run.err


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_a_command_is_stopped(
    send: Callable[[int, int], None], number: signal.Signals, files: SimpleNamespace, cli: Cli
) -> None:
    child, _ = working(cli, files.model)
    send(child.pid, number)
    eventually(lambda: number not in signals_of(child.pid, "ShdPnd"))  # it was heard
    send(child.pid, number)  # impatience does not keep it from cleaning up
    run = cli.finish(child)
    assert (run.code, run.out, run.err, run.left) == (-number, "", "llamadiff: stopped\n", [])  # a shell says 128 + n
    assert not (cli.folder / "t.safetensors").exists()


def signals_of(process: int, which: str) -> set[int]:
    """``SigCgt``: those that a process has handlers for; ``ShdPnd``: those that wait for it."""
    status = Path(f"/proc/{process}/status").read_text("utf-8")
    mask = int(status.partition(f"{which}:")[2].split()[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


MOMENTS: dict[str, Callable[[subprocess.Popen[bytes]], object]] = {
    "when it heeds signals": lambda child: signal.SIGTERM in signals_of(child.pid, "SigCgt"),  # it sets them first
    "when llama.cpp has a process": lambda child: processes_of(child.place, SERVE),
    "when something is put aside": lambda child: list(child.place.iterdir()),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_comparison_is_stopped_at_any_time(moment: str, files: SimpleNamespace, cli: Cli) -> None:
    child = cli.start("compare", files.model, *IDS, "--n-predict", "20")
    eventually(lambda: MOMENTS[moment](child) or child.poll() is not None)
    os.killpg(child.pid, signal.SIGINT)
    run = cli.finish(child)
    assert run.code in (0, -signal.SIGINT)
    assert not run.left


def test_a_killed_command_takes_llama_cpp_with_it(files: SimpleNamespace, cli: Cli) -> None:
    child, _ = working(cli, files.model)
    child.kill()
    child.communicate()
    eventually(lambda: not cli.left_by(child.place))


# -- odd, but legal --------------------------------------------------------------------------------


def test_a_hostile_working_directory(files: SimpleNamespace, cli: Cli) -> None:
    """A dash, spaces and letters in a relative path; modules lying about; a read-only directory; a bare environment."""
    folder = cli.folder / "my models"
    folder.mkdir()
    name = os.fsdecode("-mod\u00e8le \u6a21\u578b [b].gguf".encode())
    (folder / name).write_bytes(files.model.read_bytes())
    for module in ("numpy", "json", "gguf", "llama_cpp", "llamadiff", "jinja2", "signal"):
        (folder / f"{module}.py").write_text("raise SystemExit('the wrong module')", encoding="utf-8")
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    bare = ("HOME", "TMPDIR", "LANG", "LC_ALL", "TERM", "PYTHONPATH")
    run = cli("compare", "--tokens", "7", "-o", "json:-", "--", name, cwd=folder, unset=bare)
    folder.chmod(stat.S_IRWXU)
    report = json.loads(run.succeeded())
    assert (report["verdict"], report["model"]["file"]) == ("match", name)
    assert [token["id"] for token in report["tokens"]] == [7]
    assert sorted(path.suffix for path in folder.iterdir()) == [".gguf"] + [".py"] * 7


def test_a_file_name_that_is_no_text(files: SimpleNamespace, cli: Cli) -> None:
    name = b"m\xff\n.gguf"
    Path(os.fsdecode(os.path.join(os.fsencode(cli.folder), name))).write_bytes(files.model.read_bytes())
    report = json.loads(cli("compare", name, *IDS, "-o", "json:-", PYTHONIOENCODING="ascii").succeeded())
    assert report["model"]["file"] == os.fsdecode(name)
    assert r"m\udcff\n.gguf" in cli("compare", name, *IDS, PYTHONIOENCODING="ascii").succeeded()


def test_one_letter_as_a_prompt(files: SimpleNamespace, cli: Cli) -> None:
    run = cli("compare", "../" * 40 + str(files.folder / "text.gguf").lstrip("/"), "a", "-o", "new/kept/")
    assert run.succeeded().startswith("MATCH")
    kept = sorted(path.name for path in (cli.folder / "new" / "kept").iterdir())
    assert kept == ["baseline.safetensors", "engine.safetensors"]


def test_ids_from_a_pipe(files: SimpleNamespace, cli: Cli) -> None:
    line = f"{shlex.quote(COMMAND)} compare {files.model} --tokens @<(echo '1, 17\n5') --tolerance <(echo 'rule = []')"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
