"""What is installed, how llama.cpp was built, and what was found wrong, in plain words."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from llamadiff import plugins
from llamadiff.engines.own_graph import own_graph
from llamadiff.llamacpp.capture import Facts, capture, probe, scratch_directory
from llamadiff.llamacpp.library import find_package
from llamadiff.llamacpp.request import GPU, HELPER, Request, Settings
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.numerics.compiled.library import instructions
from llamadiff.numerics.cpu import BLAS_ROWS
from llamadiff.system.commands import split_line
from llamadiff.system.errors import UserError
from llamadiff.system.libraries import HERE

PACKAGES = ("numpy", "gguf", "safetensors", "rich", "typer", "pandas", "jinja2", "threadpoolctl")
EXTRAS = {"transformers": "torch", "sweep": "pyarrow"}  # what one can do without, by its extra, and a package of each
_INSTRUCTIONS = {
    "avx512": "compiled, for AVX-512",
    "avx2": "compiled, for AVX2",
    "any": "compiled; Q4_K and Q6_K, which need AVX2, are decoded by ggml",
}

# What is said of a thing: that it is as it should be, that it is not, that it is worth knowing, or only what it is.
OK, BAD, NOTE, FACT = "ok", "BAD", "note", ""


@dataclass(frozen=True)
class Examined:
    """One thing looked at: its state, and what was found."""

    name: str
    state: str
    found: str


def examine(place: Settings | None = None, stands: str = "") -> Iterator[Examined]:
    """Look at one thing after the other; at a build of llama.cpp, or the installed one.

    ``stands``: what the environment has for ``--llama-cpp``.
    """
    yield Examined("llamadiff", FACT, import_module("llamadiff").__version__)
    yield Examined("python", FACT, f"{platform.python_version()} on {platform.platform(terse=True)}")
    for name in PACKAGES:
        try:
            yield Examined(name, OK, version(name))
        except PackageNotFoundError:
            yield Examined(name, BAD, f"not installed: pip install {name}")
    for extra, name in EXTRAS.items():
        there = find_spec(name) is not None
        yield Examined(f"extra {extra}", OK if there else FACT, "installed" if there else f"not installed ({name})")
    compiler = (split_line(os.environ.get("CC", "")) or [HERE.compiler])[0]
    there = which(compiler) is not None
    found = compiler if there else f"no {compiler}: watch and --llama-cpp DIR need one; install it, or set CC"
    yield Examined("C compiler", OK if there else NOTE, found)
    yield _kernels()
    for missing in plugins.missing_slices():
        yield Examined(f"slice {missing.name}", BAD, f"missing: {missing.reason}")
    if stands:
        yield Examined("--llama-cpp", FACT, f"{stands}, by LLAMADIFF_LLAMA_CPP, where none is given")
    yield from _llama_cpp(place or Settings())


def _kernels() -> Examined:
    """What was compiled when llamadiff was installed."""
    found = instructions()
    if found is None:
        return Examined(
            "kernels", NOTE, "not compiled: NumPy takes longer; reinstall llamadiff where there is GCC or clang"
        )
    return Examined("kernels", OK, _INSTRUCTIONS[found])


def _llama_cpp(plain: Settings) -> Iterator[Examined]:
    try:
        facts: Facts = probe(plain)
    except UserError as error:
        yield Examined("llama.cpp", BAD, str(error))
        return
    where = "" if plain.llama_cpp or plain.runner else f", in {find_package().folder}"
    yield Examined("llama.cpp", FACT, facts.version + where)
    if plain.runner:
        yield Examined("runs on", FACT, f"{facts.machine}, started by {plain.runner}")
    yield Examined("built with", FACT, facts.build)
    yield Examined("tensor layout", OK, facts.layout)
    yield from _ops(plain)
    yield Examined("devices", FACT, _list_devices(facts.devices) or "none")
    yield baseline_on(facts.devices)
    yield decodes("plain decode", plain)
    yield decodes("quantized decode", plain, quantized=True)
    yield decodes("quantized decode, repacked", replace(plain, repack=True), quantized=True)


def _ops(plain: Settings) -> Iterator[Examined]:
    """Which ops of its ggml.h are judged, where its headers are on this machine."""
    graph = own_graph()
    if plain.runner or graph is None:
        return
    try:
        folder = Path(plain.llama_cpp or find_package().folder or "")
        ops = plugins.ask_first(lambda each: each.ops_of(folder))
    except UserError:
        ops = None
    if ops is not None:
        yield graph.examine_ops(ops)
    else:
        yield Examined("ops judged", FACT, "no ggml.h beside it, which would say what ops it has")


def baseline_on(devices: Sequence[tuple[str, str, str]]) -> Examined:
    """Of devices, each a name, a description and a kind: what a baseline computes on, and what llama.cpp would take."""
    gpus, helpers = (_list_devices(each for each in devices if each[2] == kind) for kind in (GPU, HELPER))
    taken = f"the CPU, not {gpus}, which llama.cpp would take by itself" if gpus else "the CPU; there is no GPU to take"
    helped = f"; products of {BLAS_ROWS} tokens and more by {helpers}, in float32" if helpers else ""
    return Examined("a baseline is on", FACT, taken + helped)


def _list_devices(devices: Iterable[tuple[str, str, str]]) -> str:
    return ", ".join(f"{name} ({words})" for name, words, _ in devices)


def decodes(name: str, settings: Settings, quantized: bool = False) -> Examined:
    """Whether llama.cpp survives the shipped model with these settings on this machine, or what it died of."""
    model = shipped_model(quantized)
    with scratch_directory() as folder:
        output = f"{folder}/t.safetensors"
        request = Request(str(model), text="Once upon a time", output=output, wanted=("embd",), settings=settings)
        try:
            capture(request)
        except UserError as error:
            died = str(error).removeprefix(f"{model}: ")
            if not settings.repack:
                return Examined(name, BAD, died)
            return Examined(name, NOTE, f"{died.split(';')[0]}; this is off unless you ask for it: leave it so")
    return Examined(name, OK, "llama.cpp survives it")
