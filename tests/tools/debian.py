"""A Debian from nothing: debootstrap makes it, and a newcomer does there what README and CONTRIBUTING say.

First `make demo`, without a compiler; then, with one, `make test`. By hand, `python tests/tools/debian.py RELEASE` does
the first alone and says what it took.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from places import ROOT  # noqa: E402

from tools.parts import MissingPartError  # noqa: E402

PROGRAMS = ("debootstrap", "unshare", "chroot")
DEMO, TEST = "make demo", "make test"
MEGABYTES = 400  # that pip may download for both
LOG = "/srv/pip.log"  # of every pip, those that fetch what compiles llama.cpp too
FETCHED = re.compile(r"^Fetched ([0-9.]+) ([kM])B in ", re.MULTILINE)  # apt's words, of the lists and of the packages
UNITS = {"k": 1000, "M": 1}
DOWNLOADED = re.compile(r"Downloading (\S+) \(([0-9.]+) ([kM])B\)")
# How this machine reaches others. What else it says of pip and apt stays here: a newcomer's machine says nothing.
FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/usr/local/share/ca-certificates")
VARIABLES = re.compile("(?i)((https?|no|all)_proxy|PIP_(CERT|INDEX_URL|TRUSTED_HOST|DEFAULT_TIMEOUT)|SSL_CERT_FILE)")
NO_NETWORK = re.compile(
    "^.*(Failed to fetch|Temporary failure|Could not resolve|Network is unreachable|Connection (?:refused|reset|timed)"
    "|connection broken|timed out|Max retries exceeded).*$", re.MULTILINE)  # fmt: skip
# In a namespace of its own: what is mounted there goes with it.
INSIDE = """
mount --bind /dev "$0/dev" && mount -t tmpfs tmpfs "$0/dev/shm" && mount -t proc proc "$0/proc" || exit
cd "$0" && exec chroot . sh -c "$1"
"""


@dataclass(frozen=True)
class Ran:
    """Both commands in a Debian: their exit code, what they printed, what pip downloaded for them; and for the first
    alone, with what Debian's packages needed, and its seconds."""

    code: int
    words: str
    megabytes: int
    demo_megabytes: int = 0
    demo_seconds: float = 0.0


def lacking() -> str:
    """Why no Debian can be made here."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {' and '.join(missing)} here: apt install debootstrap"
    able = os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False)
    return "" if able and able.returncode == 0 else "only root may mount and chroot"


def packages(document: str) -> str:
    """What README.md or CONTRIBUTING.md says is needed of Debian."""
    (named,) = re.findall("`apt install ([^`]+)`", (ROOT / document).read_text("utf-8"))
    return str(named)


def run(release: str, place: Path, copied: Callable[[Path], Path], part: str) -> Ran:
    """Both commands in a fresh Debian at ``place``, in a checkout that ``copied`` puts there.

    MissingPartError: the Debian could not be made, or what it needs could not be fetched.
    """
    make(release, place)
    checkout = copied(place / "srv" / "llamadiff")
    demo = first_run(place)
    done = demo
    if demo.code == 0:
        needed = inside(place, f"apt-get install --yes {packages('CONTRIBUTING.md')}")
        done = inside(place, f"cd /srv/llamadiff && {TEST}", part) if needed.code == 0 else needed
    if done.code and not (checkout / ".venv" / "developing").exists() and (why := NO_NETWORK.search(done.words)):
        raise MissingPartError(why[0].strip()[:200])
    return replace(demo, code=done.code, words=done.words, megabytes=fetched(place))


def first_run(place: Path) -> Ran:
    """What README says to do first, from Debian's packages to the demo's verdict."""
    started = time.monotonic()
    needed = inside(place, f"apt-get update && apt-get install --yes {packages('README.md')}")
    done = inside(place, f"cd /srv/llamadiff && {DEMO}") if needed.code == 0 else needed
    by_apt = sum(float(size) / UNITS[unit] for size, unit in FETCHED.findall(needed.words))
    megabytes = fetched(place)
    return Ran(done.code, done.words, megabytes, round(megabytes + by_apt), time.monotonic() - started)


def make(release: str, place: Path) -> None:
    """A Debian at ``place``, with this machine's way to others. MissingPartError: it could not be made."""
    made = subprocess.run(["debootstrap", "--variant=minbase", release, place], capture_output=True, check=False)
    if made.returncode:
        raise MissingPartError(f"debootstrap: {last(made.stdout + made.stderr)}")
    for path in map(Path, FILES):
        there = place / path.relative_to("/")
        if path.is_dir():
            shutil.copytree(path, there, dirs_exist_ok=True)
        elif path.exists():
            shutil.copy(path, there)


def fetched(place: Path) -> int:
    """The megabytes that pip downloaded there."""
    log = place / LOG[1:]
    return downloaded(log.read_text("utf-8") if log.exists() else "")


def inside(place: Path, command: str, part: str = "0/1") -> Ran:
    """A shell's command in that Debian, as root there, and nothing of this machine's environment but the network's."""
    environment = {name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)} | {
        "HOME": "/srv", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive",
        "PIP_LOG": LOG, "LLAMADIFF_TESTS": part,
    }  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", INSIDE, place, command],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"), 0)


def downloaded(log: str) -> int:
    """The megabytes that pip's log tells of: a file once, though the log has twice what a pip within pip fetched."""
    sizes = {name: float(size) / UNITS[unit] for name, size, unit in DOWNLOADED.findall(log)}
    return round(sum(sizes.values()))


def last(printed: bytes) -> str:
    """The last line."""
    return (printed.decode("utf-8", "replace").strip().splitlines() or [""])[-1]


def main(release: str) -> None:
    """The first run alone, of a clone of this checkout's last commit: its verdict, its seconds, what was downloaded."""
    with tempfile.TemporaryDirectory(prefix="debian-") as folder:
        place = Path(folder)
        make(release, place)
        subprocess.run(["git", "clone", "--quiet", ROOT, place / "srv" / "llamadiff"], check=True)
        ran = first_run(place)
    print(ran.words)
    print(f"{release}: exit {ran.code}, {ran.demo_seconds:.0f} s, {ran.demo_megabytes} MB: {ran.megabytes} by pip")


if __name__ == "__main__":
    main(*sys.argv[1:])
