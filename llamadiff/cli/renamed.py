"""Options under the names that they had up to 0.1: they go on working for one release, and a line says the new ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from llamadiff.cli.complaint import complain

Words = list[str]
WITH_REPORTS = {
    "compare", "diff", "diagnose", "backend", "check", "variants", "port", "weights", "sweep", "replay",
}  # fmt: skip


def _setting(key: str) -> Callable[[str], Words]:
    return lambda value: ["--llama-cpp", f"{key}={value}"]


def _report(name: str) -> Callable[[str], Words]:
    return lambda value: ["-o", f"{name}:{value}"]


def _file(option: str) -> Callable[[str], Words]:
    return lambda value: [*([option] if option else []), value if value == "-" and not option else f"@{value}"]


FLAGS = {
    "--flash-attn": ["--llama-cpp", "flash_attn=on"],
    "--repack": ["--llama-cpp", "repack=on"],
    "--explain-output": ["--explain", "600"],
    "--verbose": ["--full"],
}
VALUES = {
    "--kv-type": _setting("kv"), "--gpu-layers": _setting("gpu_layers"), "--threads": _setting("threads"),
    "--device": _setting("device"), "--runner": _setting("runner"),
    "--budget": lambda value: ["--explain", value], "--taps": lambda value: ["--only", value],
    "--layers": lambda value: ["--only", value], "--save": lambda value: ["-o", value.rstrip("/") + "/"],
    "--precision": lambda value: ["--engine", "numpy:f64" if value == "f64" else "numpy"],
    "--prompt-file": _file(""), "--tokens-file": _file("--tokens"),
    **{f"--{name}": _report(name) for name in ("json", "json-full", "csv", "junit", "markdown", "html")},
}  # fmt: skip


def in_new_names(words: Sequence[str]) -> Words:
    """A command line with today's names for the options of the commands that judge."""
    if not words or words[0] not in {*WITH_REPORTS, "capture", "doctor", "graph"}:
        return [*words]
    return [words[0], *_renamed(iter(words[1:]))]


def _renamed(words: Iterator[str]) -> Iterator[str]:
    for word in words:
        name, equals, value = word.partition("=")
        if name in FLAGS and not equals:
            yield from _said(word, FLAGS[name])
        elif name in VALUES and (given := value if equals else next(words, None)) is not None:
            yield from _said(f"{name} {given}", VALUES[name](given))
        else:
            yield word
        if word == "--":
            yield from words


def _said(old: str, new: Words) -> Words:
    if sys.stderr is not None:
        complain(f"{old} is now {' '.join(new)}; the old name goes with the next release")
    return new
