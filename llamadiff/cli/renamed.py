"""Names that commands and options had up to 0.1: they go on for one release, and a line says the new ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from os.path import join

from llamadiff.cli.complaint import complain

Words = list[str]
WITH_REPORTS = {"compare", "diff", "backend", "check", "variants", "port", "weights", "sweep", "replay"}


def _setting_of(key: str) -> Callable[[str], Words]:
    return lambda value: ["--llama-cpp", f"{key}={value}"]


def _report(name: str) -> Callable[[str], Words]:
    return lambda value: ["-o", f"{name}:{value}"]


def _file(option: str) -> Callable[[str], Words]:
    return lambda value: [*([option] if option else []), value if value == "-" and not option else f"@{value}"]


COMMANDS = {"diagnose": ["diff"], "bugs": ["explain"], "vectors": ["weights", "--vectors"]}
FLAGS = {
    "--flash-attn": ["--llama-cpp", "flash_attn=on"], "--repack": ["--llama-cpp", "repack=on"],
    "--explain-output": ["--explain", "600"], "--verbose": ["--full"],
}  # fmt: skip
COSTING = ("--text", "--spend")  # options of compare, which are loss's
PROMPT = "--prompt-file"  # an option for what is an argument, behind the model
VALUES = {
    "--kv-type": _setting_of("kv"), "--gpu-layers": _setting_of("gpu_layers"), "--threads": _setting_of("threads"),
    "--device": _setting_of("device"), "--runner": _setting_of("runner"),
    "--budget": lambda value: ["--explain", value], "--taps": lambda value: ["--only", value],
    "--layers": lambda value: ["--only", value], "--save": lambda value: ["-o", join(value, "")],
    "--precision": lambda value: ["--engine", "numpy:f64" if value == "f64" else "numpy"],
    "--prompt-file": _file(""), "--tokens-file": _file("--tokens"),
    **{f"--{name}": _report(name) for name in ("json", "json-full", "csv", "junit", "markdown", "html")},
}  # fmt: skip


def in_new_names(words: Sequence[str]) -> Words:
    """A command line with today's names for commands, and for the options of those that judge."""
    if words and words[0] in COMMANDS:
        words = [*_announce(words[0], COMMANDS[words[0]]), *words[1:]]
    if not words or words[0] not in {*WITH_REPORTS, "capture", "doctor", "graph"}:
        return [*words]
    command, *rest = _as_loss(words)
    budget = any(word.partition("=")[0] == "--budget" for word in rest)
    rest = [word for word in rest if not (budget and word == "--explain-output")]
    at = next((at for at, word in enumerate(rest) if word.partition("=")[0] == PROMPT), None)
    if at is not None and "--" not in rest:
        taken = 1 if "=" in rest[at] else 2
        rest = [*rest[:at], *rest[at + taken :], *rest[at : at + taken]]
    return [command, *_translate(iter(rest))]


def _as_loss(words: Sequence[str]) -> Words:
    """``compare GOOD ... --candidate OTHER --text FILE`` as ``loss GOOD OTHER ... --text FILE``."""
    asks = words[0] == "compare" and any(word.partition("=")[0] in COSTING for word in words)
    if not asks or "--candidate" not in words[2:-1] or words[1].startswith("-"):
        return [*words]
    at = words.index("--candidate")
    complain("compare with --text or --spend is now loss GOOD OTHER; the old name goes with the next release")
    return ["loss", words[1], words[at + 1], *words[2:at], *words[at + 2 :]]


def _translate(words: Iterator[str]) -> Iterator[str]:
    for word in words:
        name, equals, value = word.partition("=")
        if name in FLAGS and not equals:
            yield from _announce(word, FLAGS[name])
        elif name in VALUES and (given := value if equals else next(words, None)) is not None:
            yield from _announce(f"{name} {given}", VALUES[name](given))
        else:
            yield word
        if word == "--":
            yield from words


def _announce(old: str, new: Words) -> Words:
    if sys.stderr is not None:
        complain(f"{old} is now {' '.join(new)}; the old name goes with the next release")
    return new
