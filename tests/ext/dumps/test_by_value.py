"""``--map auto``: names that nobody knows, found by their values; and what is like two taps stands for neither."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faulty import BUGS
from llamaref import Engine
from proof.injected.base import Injection
from proof.injected.runs import record_faulty

from llamadiff import UserError
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How
from llamadiff.report.terminal.report import make_console, render
from llamadiff.result.comparison import Comparison
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import parse
from llamadiff.verbs import verbs

TOKENS = (1, 17, 5, 80, 42, 9, 33)
TRANSPOSED = ("Qcur_rope", "Kcur_rope", "kq", "ffn_gate", "l_out")


def scrambled(trace: Trace, path: Path, first: int = 0) -> dict[str, str]:
    """Write a trace under other names, layers counted from ``first``, some with their axes turned -> name by tap."""
    words = {
        word: f"t{n * 37 % 101:03d}" for n, word in enumerate(dict.fromkeys(parse(name).kind.word for name in trace))
    }
    names, arrays = {}, {}
    for name in trace:
        tap, values = parse(name), trace[name]
        own = re.sub("[0-9]", lambda digit: chr(ord("a") + int(digit[0])), words[tap.kind.word])
        names[name] = own if tap.layer is None else f"net.{tap.layer + first}.{own}.2"
        arrays[names[name]] = values.T if tap.kind.word in TRANSPOSED else values
    np.savez(path, **arrays)
    return names


def judged(candidate: Path, model: Path, baseline: Trace, mapping: str = "auto") -> Comparison:
    return verbs.check(baseline, model, How(name_map=mapping), candidate)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "moe", "mamba2"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_right_engine_is_lined_up(
    arch: str, first: int, small_model: Callable[..., Path], captured: Callable[..., Trace], tmp_path: Path
) -> None:
    path = small_model(arch)
    names = scrambled(record(Engine(path), TOKENS, "mine"), tmp_path / "mine.npz", first)
    result = judged(tmp_path / "mine.npz", path, captured(arch))
    assert result.verdict in ("match", "noise")
    assert not result.missing
    assert not result.extra
    assert len(result.rows) == len(names)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_at_its_tap(
    bug: Injection, small_model: Callable[..., Path], captured: Callable[..., Trace], tmp_path: Path
) -> None:
    path = small_model(bug.models[0])
    trace = record_faulty(bug, path, TOKENS)
    scrambled(trace, tmp_path / "mine.npz")
    result = judged(tmp_path / "mine.npz", path, captured(bug.models[0]))
    assert result.first_divergence is not None
    swapped = bug.cause == "gate-up-swapped"  # each has the other's values: which is read as which is wrong
    assert parse(result.first_divergence.tap).kind.word == ("ffn_swiglu" if swapped else bug.words[0])


def test_the_map_that_was_found_is_one_to_keep(
    small_model: Callable[..., Path], captured: Callable[..., Trace], tmp_path: Path
) -> None:
    path = small_model("llama")
    scrambled(record(Engine(path), TOKENS, "mine"), tmp_path / "mine.npz", 1)
    found = judged(tmp_path / "mine.npz", path, captured("llama"))
    (tmp_path / "kept.toml").write_text("\n".join(found.found_map))
    kept = judged(tmp_path / "mine.npz", path, captured("llama"), str(tmp_path / "kept.toml"))
    assert {row.tap: row.local for row in kept.rows} == {row.tap: row.local for row in found.rows}
    printed = io.StringIO()
    render(found, make_console(printed, 120))
    assert all(line in printed.getvalue() for line in found.found_map)


def test_a_strangers_name_cannot_break_the_map(
    small_model: Callable[..., Path], captured: Callable[..., Trace], tmp_path: Path
) -> None:
    path = small_model("llama")
    np.savez(tmp_path / "mine.npz", **{'a"]\\{é': captured("llama")["result_output"]})
    found = judged(tmp_path / "mine.npz", path, captured("llama"))
    (tmp_path / "kept.toml").write_text("\n".join(found.found_map), encoding="utf-8")
    kept = judged(tmp_path / "mine.npz", path, captured("llama"), str(tmp_path / "kept.toml"))
    assert [row.tap for row in kept.rows] == [row.tap for row in found.rows] == ["result_output"]


def test_what_fits_no_tap_is_ignored_and_named(
    small_model: Callable[..., Path], captured: Callable[..., Trace], tmp_path: Path
) -> None:
    path, rng = small_model("llama"), np.random.default_rng(0)
    trace = record(Engine(path), TOKENS, "mine")
    noise = {f"noise.{n}": rng.standard_normal(trace["l_out-0"].shape).astype(np.float32) for n in range(2)}
    np.savez(
        tmp_path / "mine.npz", **{f"t.{parse(name).layer}": trace[name] for name in ("l_out-0", "l_out-1")}, **noise
    )
    found = judged(tmp_path / "mine.npz", path, captured("llama"))
    assert [row.tap for row in found.rows] == ["l_out-0", "l_out-1"]
    assert found.extra == tuple(noise)
    assert "2 of its 4 tensors were ignored, their values are those of no tap, or of several: noise.0" in found.summary
    np.savez(tmp_path / "none.npz", **noise)
    with pytest.raises(UserError, match="none of the candidate's 2 tensors has the values of a tap"):
        judged(tmp_path / "none.npz", path, captured("llama"))


def test_a_map_that_a_stranger_states_was_not_found(
    small_model: Callable[..., Path], captured: Callable[..., Trace], tmp_path: Path
) -> None:
    path = small_model("llama")
    info = replace(captured("llama").info, producer={"name": "mine", "map": ["evil"]})
    trace = Trace(info, {"l_out-0": captured("llama")["l_out-0"]}, {"l_out-0": "F32"})
    assert not verbs.diff(captured("llama"), trace, path).found_map
