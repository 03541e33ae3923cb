"""Where llama-cpp-python keeps ggml's libraries, found without importing it."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llamadiff.system import libraries
from llamadiff.system.errors import UserError
from llamadiff.system.libraries import Loaded

INSTALL = "'llama-cpp-python>=0.3.36'"  # quoted, as a shell needs it
LLAMA = "llama"
GGML = {"ggml": "ggml_backend_load_all", "ggml-base": "ggml_init", "ggml-cpu": "ggml_backend_cpu_init"}  # one of each


def package() -> ModuleSpec:
    """llama-cpp-python's package, not imported. Raises UserError if it is not installed."""
    try:
        spec = find_spec("llama_cpp")
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"llama-cpp-python is not installed, so there is no baseline: pip install {INSTALL}")
    return spec


def set_fields(parameters: ctypes.Structure, **values: Any) -> None:
    """Set fields of one of llama.cpp's structures. Raises UserError for one that it has not: ctypes would not mind."""
    there = {field[0] for field in parameters._fields_}
    for name in values:
        if name not in there:
            kind = type(parameters).__name__
            raise UserError(
                f"this llama-cpp-python has no {name} in its {kind}, so that the setting would not be applied: "
                f"pip install {INSTALL}"
            )
    for name, value in values.items():
        setattr(parameters, name, value)


def beside(llama: Path, stem: str) -> Path:
    """Where one of ggml's libraries is, if it lies beside libllama."""
    return llama.with_name(llama.name.replace(LLAMA, stem, 1))


def behind(llama: Path) -> tuple[ctypes.CDLL, ...]:
    """Those of ggml's libraries that lie beside libllama and can be loaded."""
    found = list[ctypes.CDLL]()
    for stem in GGML:
        with suppress(OSError):
            found.append(Loaded(beside(llama, stem)))
    return tuple(found)


@cache
def load(stem: str) -> Any:
    """One of ggml's libraries, such as ``ggml-base``. Raises UserError if it is not there or cannot be loaded."""
    folder = Path((package().submodule_search_locations or [""])[0]) / "lib"
    for name in (pattern.format(stem) for pattern in libraries.HERE.names):
        if (folder / name).exists():
            try:
                return Loaded(folder / name)
            except OSError as error:
                raise UserError(f"{name}: cannot be loaded ({error})") from None
    raise UserError(f"no ggml library beside llama-cpp-python ({folder.name} holds no {stem})")
