"""A Debian from nothing: debootstrap makes it, and README's two commands are run there as a newcomer runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from places import ROOT

from tools.parts import MissingPartError

PROGRAMS = ("debootstrap", "unshare", "chroot")
COMMANDS = ("make demo", "make test")  # README's
MEGABYTES = 400  # that pip may download for them
LOG = "/srv/pip.log"  # of every pip, those that fetch what compiles llama.cpp too
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
    """README's commands in a Debian: their exit code, what they printed, what pip downloaded for them."""

    code: int
    words: str
    megabytes: int


def lacking() -> str:
    """Why no Debian can be made here."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {' and '.join(missing)} here: apt install debootstrap"
    able = os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False)
    return "" if able and able.returncode == 0 else "only root may mount and chroot"


def packages() -> str:
    """What README says is needed of Debian."""
    (named,) = re.findall("`apt install ([^`]+)`", (ROOT / "README.md").read_text("utf-8"))
    return str(named)


def run(release: str, place: Path, copied: Callable[[Path], Path], part: str) -> Ran:
    """README's commands in a fresh Debian at ``place``, in a checkout that ``copied`` puts there.

    MissingPartError: the Debian could not be made, or what it needs could not be fetched.
    """
    made = subprocess.run(["debootstrap", "--variant=minbase", release, place], capture_output=True, check=False)
    if made.returncode:
        raise MissingPartError(f"debootstrap: {last(made.stdout + made.stderr)}")
    for path in map(Path, FILES):
        there = place / path.relative_to("/")
        if path.is_dir():
            shutil.copytree(path, there, dirs_exist_ok=True)
        elif path.exists():
            shutil.copy(path, there)
    checkout = copied(place / "srv" / "llamadiff")
    needed = inside(place, f"apt-get update && apt-get install --yes {packages()}")
    done = inside(place, f"cd /srv/llamadiff && {' && '.join(COMMANDS)}", part) if needed.code == 0 else needed
    if done.code and not (checkout / ".venv" / "developing").exists() and (why := NO_NETWORK.search(done.words)):
        raise MissingPartError(why[0].strip()[:200])
    log = place / LOG[1:]
    return Ran(done.code, done.words, downloaded(log.read_text("utf-8") if log.exists() else ""))


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
    sizes = {name: float(size) / (1000 if unit == "k" else 1) for name, size, unit in DOWNLOADED.findall(log)}
    return round(sum(sizes.values()))


def last(printed: bytes) -> str:
    """The last line."""
    return (printed.decode("utf-8", "replace").strip().splitlines() or [""])[-1]
