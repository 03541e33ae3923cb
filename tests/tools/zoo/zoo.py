"""Every architecture that llama.cpp names: a tiny random model of each, and every node of its graph checked.

``zoo.py [ARCHITECTURE ...] [--type F32|F16|Q8_0] [--flash-attn]``; a line each, exit code 1 if a node is wrong or
unchecked. What a model consists of is asked of llama.cpp: a file that lacks a tensor or a key is refused with its name,
one that has a tensor of another shape with the right one. architectures.json says what each key may be, and which
architectures want more than that.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from llamadiff import UserError
from llamadiff.engines.run_spec import Run
from llamadiff.ext.graph.backend import judge_graph
from llamadiff.llamacpp.request import Settings
from llamadiff.result.comparison import Comparison

KNOWN = json.loads(Path(__file__).with_name("architectures.json").read_text("utf-8"))
ALWAYS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "vocab_size", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon",
)  # fmt: skip
# parts of the names of matrices that llama.cpp wants in float32
FLOATS = ("conv", "ssm_", "norm", "time_mix_", "rel_b", "token_shift", "lerp", "_ape", "token_types", "wkv_gate_bias")
ATTEMPTS = 900
TOKENS = tuple(int(token) for token in np.random.default_rng(7).integers(1, 90, 40))
MISSING = re.compile(r"tensor '([^']+)' not found|missing tensor '([^']+)'")
SHAPE = re.compile(r"tensor '([^']+)' has wrong shape; expected\s*([\d, ]+), got")
KEY = re.compile(r"key not found in model: (\S+)")

Shapes = dict[str, tuple[int, ...]]  # ggml's order, innermost first


class CannotError(Exception):
    """Why there is no model of an architecture."""


def synthesize(arch: str, kind: str, path: Path) -> None:
    """Write a model that llama.cpp loads. Raises CannotError. It may also abort: run it in a process of its own."""
    from llama_cpp import llama_cpp as lib

    log: list[str] = []

    @lib.llama_log_callback  # type: ignore[untyped-decorator]
    def listen(_level: int, text: bytes, _data: Any) -> None:
        log.append(text.decode("utf8", "replace"))

    lib.llama_log_set(listen, None)
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.n_gpu_layers, params.use_extra_bufts = 0, False
    special = KNOWN["architectures"].get(arch, {})
    keys = {f"{arch}.{key}": KNOWN["defaults"][key] for key in ALWAYS}
    for key, value in special.get("keys", {}).items():
        keys[key[1:] if key.startswith("/") else f"{arch}.{key}"] = value
    tensors = _wanted(special.get("tensors", ()), keys[f"{arch}.block_count"])
    for _ in range(ATTEMPTS):
        _write(path, arch, keys, tensors, kind)
        log.clear()
        if lib.llama_model_load_from_file(str(path).encode(), params):
            return
        _mend("".join(log), arch, keys, tensors)
    raise CannotError(f"not loaded after {ATTEMPTS} attempts")


def _wanted(names: list[str], n_layer: int) -> Shapes:
    """Optional tensors: ``*name`` in every layer, ``name:64,96`` of a shape."""
    out: Shapes = {}
    for given in names:
        name, _, shape = given.partition(":")
        for full in [f"blk.{i}.{name[1:]}" for i in range(n_layer)] if name.startswith("*") else [name]:
            out[full] = tuple(map(int, shape.split(","))) if shape else (1,)
    return out


def _mend(log: str, arch: str, keys: dict[str, Any], tensors: Shapes) -> None:
    """Give llama.cpp what it said it lacks."""
    missing, shape, key = MISSING.search(log), SHAPE.search(log), KEY.search(log)
    if missing:
        tensors[missing[1] or missing[2]] = (1,)
    elif shape:
        wanted = tuple(int(size) for size in shape[2].split(",") if size.strip())
        if tensors.get(shape[1]) == wanted:
            raise CannotError(shape[0])
        tensors[shape[1]] = wanted
    elif key and key[1] not in keys and key[1].removeprefix(f"{arch}.") in KNOWN["defaults"]:
        keys[key[1]] = KNOWN["defaults"][key[1].removeprefix(f"{arch}.")]
    else:
        errors = [line for line in log.splitlines() if "error" in line.lower()]
        raise CannotError(" ".join(errors[-1:]) or "llama.cpp refuses the file without a word")


def _write(path: Path, arch: str, keys: Mapping[str, Any], tensors: Shapes, kind: str) -> None:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](key, value)
    rng = np.random.default_rng(0)
    for name, shape in tensors.items():
        x = _values(name, shape[::-1], rng)
        matrix = (
            len(shape) > 1 and shape[0] % 32 == 0 and name.endswith("weight") and not any(f in name for f in FLOATS)
        )
        if matrix and kind != "F32" and x.dtype.kind == "f":
            of = gguf.GGMLQuantizationType[kind]
            x = gguf.quants.quantize(x, of)
            writer.add_tensor(name, x, raw_dtype=of)
        else:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random values of a sane size; of a table from tokens to experts, experts' numbers."""
    if "tid2eid" in name:
        experts = rng.random((shape[0] if len(shape) > 1 else 1, KNOWN["defaults"]["expert_count"]))
        return np.argsort(experts, axis=1)[:, : shape[-1]].astype(np.int32)
    x = rng.standard_normal(shape)
    if name.endswith("ssm_a"):
        x = -np.abs(x) - 0.2
    elif ("norm" in name and name.endswith("weight")) or name.endswith("_scale"):
        x = 1 + 0.1 * x
    else:
        x *= 0.1 if len(shape) == 1 else 0.7 / np.sqrt(shape[-1])
    return x.astype(np.float32)


def check(arch: str, kind: str, flash_attn: bool, folder: Path) -> tuple[bool, str]:
    """Whether all nodes of an architecture are right, and what is to be said of it."""
    path = folder / f"{arch}.gguf"
    command = [sys.executable, __file__, arch, "--type", kind, "--only-write", str(path)]
    made = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        encoding="utf-8",
    )
    if made.returncode != 0:
        said = [line for line in made.stderr.splitlines() if "ASSERT" in line] or made.stderr.splitlines() or ["died"]
        return False, f"no model: {said[-1]}"
    try:
        run = Run(tokens=TOKENS, n_predict=2, settings=Settings(flash_attn=flash_attn))
        found: Comparison = judge_graph(path, run)
    except UserError as error:
        return False, str(error)
    worst = max((row.local.nmse for row in found.rows if row.local is not None), default=0.0)
    return found.verdict in ("match", "noise"), f"{found.verdict}, {len(found.rows)} nodes, worst NMSE {worst:.1e}"


def main() -> None:
    """Check; or only write a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE")
    parser.add_argument("--type", default="F32", choices=("F32", "F16", "Q8_0"))
    parser.add_argument("--flash-attn", action="store_true")
    parser.add_argument("--only-write", type=Path, metavar="FILE.gguf")
    options = parser.parse_args()
    if options.only_write is not None:
        try:
            synthesize(options.architectures[0], options.type, options.only_write)
        except CannotError as error:
            sys.exit(str(error))
        return
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for arch in options.architectures or KNOWN["architectures"]:
            right, said = check(arch, options.type, options.flash_attn, Path(folder))
            bad += not right
            print(f"{'' if right else 'NOT RIGHT  '}{arch}: {said}", flush=True)
    sys.exit(f"{bad} architectures are not right" if bad else 0)


if __name__ == "__main__":
    main()
