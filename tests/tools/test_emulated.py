"""Parts for other CPUs: which are asked for, how they are asked, what is said where programs are missing."""

from __future__ import annotations

import pytest

from tools import backends, emulated
from tools.parts import MissingPartError

ARM_PARTS = ["arm82", "arm86", "sve128", "sve256", "sve512"]


def test_groups_are_made_where_they_are_asked_for():
    plain = backends.named([])
    assert "vulkan" in plain
    assert not set(plain) & set(emulated.PARTS)
    assert backends.named(["arm"]) == ARM_PARTS
    assert backends.named(["sve512", "rpc"]) == ["rpc", "sve512"]


def test_one_line_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingPartError) as said:
        emulated.PARTS["arm82"].make()
    line = str(said.value)
    assert line.startswith("no qemu-aarch64 and no aarch64-linux-gnu-gcc and")
    assert line.endswith("apt install qemu-user gcc-aarch64-linux-gnu g++-aarch64-linux-gnu cmake ninja-build")
    assert "\n" not in line


def test_a_part_is_asked_through_its_emulator(monkeypatch, tmp_path):
    monkeypatch.setattr(emulated, "FOLDER", tmp_path)
    root = tmp_path / "root-arm64"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/python3.11").touch()
    (root / "whole").touch()
    usage = emulated.PARTS["sve256"].use(tmp_path / "build")
    command = f"qemu-aarch64 -cpu max,sve-default-vector-length=32 -L {root} {root}/usr/bin/python3.11"
    assert usage.options == ("--llama-cpp", f"runner={command}", "--llama-cpp", str(tmp_path / "build"))
    assert usage.environment == {"CC": "aarch64-linux-gnu-gcc"}


def test_packages_that_a_python_loads_are_unpacked():
    names = [
        "python3-minimal",
        "python3.11-minimal",
        "libc6",
        "libperl5.36",
        "perl",
        "dpkg",
        "zlib1g",
        "libssl3",
        "gcc-12-base",
    ]
    assert [name for name in names if emulated.WANTED.match(name)] == [
        "python3.11-minimal",
        "libc6",
        "zlib1g",
        "libssl3",
    ]


def test_the_table_tells_ways_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "FOUND", tmp_path / "found.jsonl")
    row = '{"part": "%s", "tokens": 10, %s"model": "m", "nodes": 5, "verdict": "%s", "wrong": %s}\n'
    rows = [row % ("rpc", "", "match", "[]"), row % ("sve512", '"way": "backend, F32 cache", ', "wrong", '["MUL_MAT"]')]
    backends.FOUND.write_text("".join(rows), encoding="utf-8")
    assert [" ".join(line.split()) for line in backends.table().splitlines()] == [
        "part tokens way models nodes match not right",
        "rpc 10 1 5 1",
        "sve512 10 backend, F32 cache 1 5 0 m: MUL_MAT",
    ]
