"""llama.cpp for other CPUs, each run by an emulator: a Python for them, and builds by cross compilers.

Nothing is installed and nothing needs root: packages of the other CPU are unpacked into a folder of their own. What it
needs of this machine is said in one line where it lacks. The packages are those of the suite that this machine's apt
knows, or of LLAMADIFF_SUITE.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tools.parts import FOLDER, PACKAGE, MissingPartError, Part, Usage, built, run, sources

ON_ARM = "fp16+dotprod"
NEWER_THAN_GCC_12 = ("RVV", "RV_ZFH", "RV_ZVFH", "RV_ZICBOP", "RV_ZIHINTPAUSE")
WHOLE = "arm82"  # the part whose libllama the others of its release copy: it is the same one
# Of Debian's packages that a Python depends on, those that have what it loads.
WANTED = re.compile(r"(lib(?!perl)|python3\.|zlib)\S*$")
WITHOUT = (
    "-DGGML_NATIVE=OFF", "-DGGML_OPENMP=OFF", "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_OPENSSL=OFF", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A kind of CPU: what Debian, its compilers and the emulator call it."""

    name: str
    debian: str
    compilers: str

    @property
    def compiler(self) -> str:
        return f"{self.compilers}-gcc"

    @property
    def emulator(self) -> str:
        return f"qemu-{self.name}"

    @property
    def packages(self) -> str:
        """What apt installs for it."""
        return f"qemu-user gcc-{self.compilers} g++-{self.compilers} cmake ninja-build"

    def lacks(self) -> str:
        """Which programs are not there, and the line that installs them; nothing where all are."""
        wanted = (self.emulator, self.compiler, f"{self.compilers}-g++", "cmake", "ninja", "apt-get", "dpkg-deb")
        missing = [name for name in wanted if not shutil.which(name)]
        return f"no {' and no '.join(missing)} here: apt install {self.packages}" if missing else ""


ARM = Machine("aarch64", "arm64", "aarch64-linux-gnu")
POWER = Machine("ppc64le", "ppc64el", "powerpc64le-linux-gnu")
RISCV = Machine("riscv64", "riscv64", "riscv64-linux-gnu")


@dataclass(frozen=True)
class Variant:
    """One build for a machine: what cmake is told, which CPU is emulated, and whose llama.cpp it is."""

    machine: Machine
    options: tuple[str, ...]
    cpu: str
    release: str | None = None
    folder: str = ""


# -- a root with a Python ----------------------------------------------------------------------------------------------


def root(machine: Machine) -> Path:
    """A folder with the machine's Python and what it loads, as Debian has them."""
    folder = FOLDER / f"root-{machine.debian}"
    if (folder / "whole").is_file():
        return folder
    apt = _apt(machine)
    with suppress(MissingPartError):  # one of several archives may not answer, and another have all
        run("apt-get", *apt, "--quiet", "update")
    debs = folder / "debs"
    shutil.rmtree(folder, ignore_errors=True)
    debs.mkdir(parents=True)
    run("apt-get", *apt, "--quiet", "download", *sorted(_packages(apt)), where=debs)
    for package in sorted(debs.glob("*.deb")):
        run("dpkg-deb", "--extract", package, folder)
    _merge_usr(folder)
    python(folder)
    shutil.rmtree(debs)
    (folder / "whole").touch()
    return folder


def python(folder: Path) -> Path:
    """The Python of such a folder."""
    found = sorted((folder / "usr/bin").glob("python3.*"))
    if not found:
        raise MissingPartError(f"the packages for {folder.name} have no Python")
    return found[-1]


def _apt(machine: Machine) -> list[str]:
    """Options by which apt knows nothing but this machine's packages, in a folder of its own."""
    folder = FOLDER / f"apt-{machine.debian}"
    for name in ("lists/partial", "cache/archives/partial", "sources"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    settings = {
        "APT::Architecture": machine.debian, "APT::Architectures::": machine.debian, "Dir::State": folder,
        "Dir::State::status": folder / "status", "Dir::Cache": folder / "cache", "Debug::NoLocking": 1,
        "APT::Sandbox::User": "root", **_suite(folder / "sources"),
    }  # fmt: skip
    return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]


def _suite(folder: Path) -> dict[str, object]:
    """The machine's own sources of packages, or the first of them with LLAMADIFF_SUITE in place of its suites."""
    suite = os.environ.get("LLAMADIFF_SUITE")
    if not suite:
        return {}
    known = [path.read_text("utf-8") for path in Path("/etc/apt").glob("sources.list*/*.sources")]
    first = next(filter(None, (re.search(r"^URIs: *(\S+/debian)/?$", text, re.MULTILINE) for text in known)), None)
    if first is None:
        raise MissingPartError("LLAMADIFF_SUITE needs a Debian whose /etc/apt/sources.list.d names its archive")
    signed = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "suite.list").write_text(f"deb [signed-by={signed}] {first[1]} {suite} main\n", encoding="utf-8")
    return {"Dir::Etc::sourcelist": folder / "suite.list", "Dir::Etc::sourceparts": "/dev/null"}


def _packages(apt: Iterable[str]) -> set[str]:
    """A Python, its library and all libraries that they and llama.cpp load."""
    only = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    said = run("apt-cache", *apt, "depends", "--recurse", *only, "python3-minimal", "libpython3-stdlib", "libstdc++6",
               "libgomp1")  # fmt: skip
    return {name for name in said.splitlines() if WANTED.match(name)}


def _merge_usr(folder: Path) -> None:
    """Put /lib into /usr/lib, as an installed Debian has it; links to a place on the machine stay in the root."""
    lib = folder / "lib"
    if lib.is_dir() and not lib.is_symlink():
        shutil.copytree(lib, folder / "usr/lib", symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(lib)
    for name in ("lib", "lib64"):
        if not (folder / name).exists() and (folder / "usr" / name).is_dir():
            (folder / name).symlink_to(f"usr/{name}")
    for link in folder.rglob("*"):
        if link.is_symlink() and link.readlink().is_absolute():
            target = os.path.relpath(f"{folder}{link.readlink()}", link.parent)
            link.unlink()
            link.symlink_to(target)


# -- builds ------------------------------------------------------------------------------------------------------------


def make(variant: Variant) -> Path:
    """A build for a CPU, and the root that it runs in."""
    if lacking := variant.machine.lacks():
        raise MissingPartError(lacking)
    root(variant.machine)
    release = variant.release or version(PACKAGE)
    folder = FOLDER / f"cross-{release}-{variant.folder or variant.machine.name}"
    whole = FOLDER / f"cross-{release}-{WHOLE}"
    if variant.folder in ("", WHOLE) or variant.release:
        return _cross(variant, release, folder, "llama")
    if not (whole / "bin/libllama.so").exists():
        make(VARIANTS[WHOLE])
    _cross(variant, release, folder, "ggml")
    for path in (whole / "bin").glob("libllama.*"):
        shutil.copy2(path, folder / "bin", follow_symlinks=False)
    return folder


def _cross(variant: Variant, release: str, folder: Path, *targets: str) -> Path:
    machine = variant.machine
    return built(
        sources(release), folder, targets, "-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={machine.name}",
        f"-DCMAKE_C_COMPILER={machine.compiler}", f"-DCMAKE_CXX_COMPILER={machine.compilers}-g++", *WITHOUT,
        *variant.options,
    )  # fmt: skip


def runner(variant: Variant) -> str:
    """The words that start a Python on this CPU."""
    folder = root(variant.machine)
    return f"{variant.machine.emulator} -cpu {variant.cpu} -L {folder} {python(folder)}"


def use(variant: Variant, folder: Path) -> Usage:
    """How llamadiff is asked about it."""
    options = ("--llama-cpp", f"runner={runner(variant)}", "--llama-cpp", str(folder))
    return Usage(options, {"CC": variant.machine.compiler})


# -- which -------------------------------------------------------------------------------------------------------------


def _arm(features: str, *names: str) -> tuple[str, ...]:
    return (f"-DGGML_CPU_ARM_ARCH={'+'.join([features, ON_ARM, *names])}",)


def _vectors(bits: int) -> str:
    """A CPU with everything, whose vectors have so many bits: the emulator counts bytes."""
    return f"max,sve-default-vector-length={bits // 8}"


_SVE = _arm("armv8.6-a", "i8mm", "bf16", "sve")
VARIANTS = {
    WHOLE: Variant(ARM, _arm("armv8.2-a"), "max,sve=off", folder=WHOLE),
    "arm86": Variant(ARM, _arm("armv8.6-a", "i8mm", "bf16"), "max,sve=off", folder="arm86"),
    **{f"sve{bits}": Variant(ARM, _SVE, _vectors(bits), folder="sve") for bits in (128, 256, 512)},
}
OLD = {
    f"{release}-sve{bits}": Variant(ARM, _SVE, _vectors(bits), release, "sve")
    for release, bits in (("0.3.16", 256), ("0.3.23", 128), ("0.3.23", 256))
}
# s390x is not among them: root and build are made as these are, but llama.cpp wants big-endian files there.
OTHERS = {
    "ppc64le": Variant(POWER, ("-DGGML_CPU_POWERPC_CPUTYPE=power9",), "power9"),
    "riscv64": Variant(RISCV, (*(f"-DGGML_{name}=OFF" for name in NEWER_THAN_GCC_12),), "rv64"),
}
_ABOUT = {
    WHOLE: "armv8.2 with fp16 and dotprod: Apple's M1", "arm86": "armv8.6 with i8mm and bf16: Apple's M2 and later",
}  # fmt: skip


def _part(name: str, variant: Variant, group: str) -> Part:
    said = f"{variant.machine.name} of {PACKAGE} {variant.release or version(PACKAGE)}'s"
    if name in _ABOUT:
        said = _ABOUT[name]
    elif name.partition("sve")[2]:
        said = f"{said}, vectors of {name.partition('sve')[2]} bits"
    return Part(said, lambda: make(variant), lambda folder: use(variant, folder), group=group)


def parts(variants: dict[str, Variant], group: str) -> dict[str, Part]:
    """The parts that `make backends` knows."""
    return {name: _part(name, variant, group) for name, variant in variants.items()}


PARTS = {**parts(VARIANTS, "arm"), **parts(OLD, "old"), **parts(OTHERS, "others")}
