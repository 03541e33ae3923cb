"""C of llamadiff's own, compiled on the machine that it is for, and kept there."""

from __future__ import annotations

import hashlib
import os
import pkgutil
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llamadiff.system import libraries
from llamadiff.system.commands import split_line
from llamadiff.system.errors import UserError
from llamadiff.system.output import write_whole
from llamadiff.system.stale_files import cache_directory, is_private, temporary_directory

Used = TypeVar("Used")
MOST = 20  # shims that are kept
PATIENCE = 300.0  # seconds that the compiler may take
_ERROR = re.compile(r"error:|undefined|not found|wrong format|incompatible")


@dataclass(frozen=True)
class Shim:
    """A library to compile from the C ``file`` of a ``package``.

    ``before`` and ``after`` the source stand the compiler's words; ``option`` and ``why`` (it is needed) are for a
    machine without a compiler; ``refused`` is what is said, with its first error, where that takes it for wrong.
    """

    file: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    option: str
    why: str
    refused: Callable[[str], str]
    package: str = "llamadiff.ext.builds"

    @property
    def source(self) -> bytes:
        """The C, wherever this module was found."""
        found = pkgutil.get_data(self.package, self.file)
        assert found is not None
        return found


def kept(shim: Shim, texts: Iterable[bytes], words: Sequence[str], use: Callable[[Path], Used]) -> Used:
    """What ``use`` makes of a shim's library: one that is kept, or one that is compiled, and kept if it can be used.

    It is told from others by ``texts`` (headers) and ``words``. Raises UserError if it cannot be made or used.
    """
    place = _place([shim.source, *texts], [os.environ.get("CC", ""), *words])
    if place is not None and place.is_file():
        with suppress(OSError):
            os.utime(place)
            return use(place)
    with temporary_directory() as folder:
        target = folder / f"shim{libraries.HERE.suffix}"
        compiled(shim, target)
        used = use(target)
        if place is not None:
            with suppress(OSError, UserError):  # where nothing can be kept, it is compiled again next time
                write_whole(place, target.read_bytes())
                for old in sorted(place.parent.glob(f"*{place.suffix}"), key=lambda file: file.stat().st_mtime)[:-MOST]:
                    old.unlink()
    return used


def compiled(shim: Shim, target: Path) -> None:
    """Run the system's C compiler. Raises UserError with the first error that it states."""
    compiler = split_line(os.environ["CC"]) if os.environ.get("CC") else [libraries.HERE.compiler]
    command = [*compiler, *shim.before, "-o", str(target), "-x", "c", "-", "-x", "none", *shim.after]
    try:
        done = subprocess.run(  # noqa: S603
            command, input=shim.source, capture_output=True, timeout=PATIENCE, check=False,
            cwd=target.parent,  # what linkers leave beside a library: symbols, an import library
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(
            f"{shim.option}: {compiler[0]} is not installed, and a C compiler is needed {shim.why}; "
            "install one, or name it in CC (pip install ziglang, CC='python -m ziglang cc')"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{shim.option}: {compiler[0]} did not end within {PATIENCE:.0f} s; run it again") from None
    if done.returncode:
        raise UserError(shim.refused(_first_error(done.stderr.decode("utf-8", "replace"))))


def _first_error(said: str) -> str:
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
    chosen = next((line for line in lines if _ERROR.search(line)), lines[0] if lines else "no message")
    return re.sub(r"\S*[/\\]([\w.+-]+(?::\d+)*)", r"\1", chosen)[:300]


def _place(texts: Iterable[bytes], words: Sequence[str]) -> Path | None:
    """Where a shim is kept, by a hash of all that it is made from; None where no place is safe."""
    cache = _private(cache_directory())
    if cache is None:
        return None
    digest = hashlib.sha256()
    for word in words:
        digest.update(word.encode("utf-8", "surrogateescape") + b"\0")
    for text in texts:
        digest.update(hashlib.sha256(text).digest())
    return cache / f"{digest.hexdigest()}{libraries.HERE.suffix}"


def _private(cache: Path | None) -> Path | None:
    """The directory of shims: what is in it is run, so it must be this user's, and no other's to write in."""
    if cache is None:
        return None
    place = cache / "shims"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place if is_private(place) else None
    except OSError:
        return None
