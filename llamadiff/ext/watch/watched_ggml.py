"""Where a watched program's ggml has the fields of its tensors, and how it rounds: asked in a process of its own, since
a library that is loaded stays.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from ctypes import c_char_p, sizeof
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamadiff.llamacpp.layout import structure_at, tensor_structure
from llamadiff.llamacpp.probes import rounding_of
from llamadiff.llamacpp.tensors import computed_flag
from llamadiff.system import python_child
from llamadiff.system.errors import UserError
from llamadiff.system.libraries import Loaded

PATIENCE = 60  # seconds
FIELDS = (  # as watch.c reads them
    "type", "buffer", "ne", "nb", "op", "op_params", "flags", "src", "view_src", "view_offs", "data", "name",
)  # fmt: skip


@dataclass(frozen=True)
class Ggml:
    """One library of a program's: where its tensors have their fields, its ``version``, what ``rounding_of`` gives.

    ``computed``: the flag of nodes that it computes (``computed_flag``). ``refused`` says why it cannot be read.
    """

    path: str
    places: Mapping[str, int] = field(default_factory=dict)
    computed: int = 0
    version: str = ""
    rounding: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refused: str = ""

    @property
    def structure(self) -> Any:
        """``struct ggml_tensor``."""
        return structure_at(self.places)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What watch.c is told: the places, the structure's size, how many sources it has, the flag.

        Zeros of one that cannot be read.
        """
        if self.refused:
            return (0,) * (len(FIELDS) + 3)
        made = self.structure
        return (*(self.places[name] for name in FIELDS), sizeof(made), len(made().src), self.computed)


def asked(base: str, cpu: str) -> Ggml:
    """What a library says of itself, and the one that computes beside it; ``refused`` where it cannot be asked."""
    try:
        done = subprocess.run(  # noqa: S603
            python_child.command("llamadiff.ext.watch.watched_ggml", base, cpu), stdin=subprocess.DEVNULL,
            capture_output=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        if not done.returncode:
            return Ggml(base, **json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return Ggml(base, refused="does not answer")
    return Ggml(base, refused=python_child.how_it_ended(done.returncode))


def main(base: str, cpu: str) -> None:
    """Print what ``asked`` reads."""
    python_child.leave_no_core()
    said: dict[str, Any] = {}
    try:
        library = Loaded(Path(base))
        structure = tensor_structure(library)
        said["places"] = {name: getattr(structure, name).offset for name in FIELDS}
        said["computed"] = computed_flag(library, structure)
        said["version"] = _version(library)
        with suppress(OSError):
            said["rounding"] = rounding_of(Loaded(Path(cpu))) if cpu else {}
    except (OSError, UserError) as error:
        said = {"refused": str(error)}
    print(json.dumps(said))


def _version(library: Any) -> str:
    try:
        function = library.ggml_version
    except AttributeError:
        return ""
    function.restype = c_char_p
    return str(function().decode("utf-8", "replace"))
