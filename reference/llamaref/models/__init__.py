"""The architectures: one module each, named by its GGUF architecture string. Adding a file adds one."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

ARCHITECTURES: dict[str, ModuleType] = {
    module.name: import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)
}
