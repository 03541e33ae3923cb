"""The architectures: one module each, named by its GGUF architecture string. Adding a file adds one.

Each says what all its models have in common, ``TRAITS``, and computes one ``layer``; the engine runs them in turn.
Where the metadata says more than Llama's, ``configure(config, read)`` adds it to what every architecture reads.
A hyphen of the string is an underscore of the file: gpt-oss is gpt_oss.py.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

ARCHITECTURES: dict[str, ModuleType] = {
    module.name.replace("_", "-"): import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)
}
