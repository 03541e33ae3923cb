"""What all rooms have: models, llama.cpp's traces of them, which tests run, and why some did not."""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import builds
import pytest
from faulty import BUGS
from machine import Machine
from models import random_models
from models.options import OPTIONS
from models.small import write_model
from once import once
from proof.injected.runs import record_faulty
from quick import mark_slow, read_quick_cases
from traces import TOKENS, save
from waiting import HANG

from llamadiff.engines.run_spec import Run
from llamadiff.llamacpp.capture import capture
from llamadiff.llamacpp.request import Request
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import record

PROMPT = (*TOKENS, 42, 9, 33)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each process that a test starts compiles all sources anew

collect_ignore = ["ext/captures/sample"]  # a project of its own, whose tests test_sample.py runs


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """LLAMADIFF_TESTS=3/5: a fifth of the tests (tools/matrix.py), and those without which a snapshot looks unused."""
    mark_slow(items, read_quick_cases())
    part, _, parts = os.environ.get("LLAMADIFF_TESTS", "0/1").partition("/")
    items[:] = [
        item for item in items
        if crc32(item.nodeid.encode()) % int(parts) == int(part) or "snapshot" in getattr(item, "fixturenames", ())
    ]  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker says how large it became."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = _peak(resource.RUSAGE_SELF)


def pytest_testnodedown(node: Any) -> None:
    """Its peak is kept for the summary."""
    if output := getattr(node, "workeroutput", None):
        _PEAKS.append(output["peak"])


_PEAKS: list[int] = []


def _peak(who: int) -> int:
    """The most MB that a process had in memory: this one, or the largest of those that it started."""
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024) // 1_000_000


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how much memory the tests took; count those that were not run, by the reason."""
    if not hasattr(terminalreporter.config, "workeroutput"):
        own = sorted(_PEAKS or [_peak(resource.RUSAGE_SELF)])
        largest = max(*own, _peak(resource.RUSAGE_CHILDREN))
        terminalreporter.write_line(f"memory: {', '.join(map(str, own))} MB; of any process: {largest} MB")
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} not run: {reason}")


@pytest.fixture(autouse=True, scope="session")
def _kept_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What zig keeps of what it compiled, where it cannot be kept at home."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.access(Path.home(), os.W_OK):
            patch.setenv("ZIG_GLOBAL_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "zig"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _patient() -> Iterator[None]:
    """A prompt is rendered in this process's time, not in ten seconds of a machine that may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError):
            patch.setattr("llamadiff.ext.prompt.chat_template.SECONDS", HANG)
        yield


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """small_model("qwen2", "Q8_0"): the path of such a model."""
    folder = tmp_path_factory.mktemp("models")

    def get(name: str = "llama", kind: str = "F16") -> Path:
        path = folder / f"{name}.{kind}.gguf"
        return path if path.exists() else write_model(path, kind=kind, **OPTIONS[name])

    return get


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """random_model("bloom.F16"): the path of that one of ``random_models.NAMES``."""
    folder = once(tmp_path_factory, "random-models", random_models.write)
    return lambda name: folder / f"{name}.gguf"


@pytest.fixture(scope="session")
def captured(small_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trace]:
    """captured("qwen2", "Q8_0", tokens): llama.cpp's run of a small model, captured once a run of the tests."""

    def get(name: str = "llama", kind: str = "F16", tokens: Sequence[int] = PROMPT) -> Trace:
        model = small_model(name, kind)
        content = sha256(model.read_bytes() + repr(tuple(tokens)).encode()).hexdigest()

        def write(folder: Path) -> None:
            capture(Request(str(model), tokens=tuple(tokens), output=str(folder / "t.safetensors")))

        return Trace.open(once(tmp_path_factory, f"captured-{content}", write) / "t.safetensors")

    return get


@pytest.fixture(scope="session")
def captures(small_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two captures of a small model, a.safetensors and b.safetensors; it must not be written to."""
    folder = tmp_path_factory.mktemp("captures")
    for name, some in (("a", PROMPT), ("b", TOKENS)):
        record(small_model(kind="Q8_0"), Run(tokens=some), folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="session")
def faulty(small_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a trace with a bug in it, of TOKENS: a RoPE of the other layout."""
    trace = record_faulty(BUGS[0], small_model(), TOKENS)
    return save(trace, tmp_path_factory.mktemp("faulty") / "faulty.safetensors")


@pytest.fixture(scope="session")
def machine() -> Machine:
    """machine.needs(settings, path): go on only where llama.cpp survives that."""
    return Machine()


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """The installed llama.cpp as a build of one's own."""
    return builds.checkout(tmp_path / "checkout")
