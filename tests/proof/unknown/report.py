"""Have llamadiff judge each fault: does it say where the fault is, and what it is?

    cd tests && python -m proof.unknown.report [--kept-back] [--dump whole|layers|logits] [--only NAME] [--text]

A line for each: exit code, the tap said and the true one, seconds; then the headline and what the report says, for a
reader to hold them together; with ``--text`` all that llamadiff prints. ``--right`` judges the engines without a fault.
``--check`` runs no llamadiff, and holds what each fault names as its first tap against the engines' values.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from models import random_models
from models.options import OPTIONS
from models.small import write_model
from safetensors.numpy import save_file

from proof.unknown import numpy_engine, torch_engine
from proof.unknown.fault import Fault, Faults

DUMPS = {"whole": ("",), "layers": ("l_out-", "result_output"), "logits": ("result_output",)}
LOUD = np.random.default_rng(8).standard_normal((512, 256), np.float32)
OWN = {  # a longer context, and values beyond float16's, which llama.cpp itself has no trouble with in float32
    "qwen2-long": OPTIONS["qwen2"] | {"extra": {"context_length": 512}},
    "llama-loud": {"kind": "F32", "tensors": {
        "blk.0.attn_q.weight": 6 * LOUD[:256], "blk.0.attn_k.weight": 3 * LOUD[:128], "blk.0.ffn_up.weight": 2000 * LOUD
    }},
}  # fmt: skip
TORCH = ("gpt2", "starcoder2", "mpt", "mamba", "mamba2", "lfm2", "qwen35", "granitehybrid")


def write_models(folder: Path, names: set[str]) -> None:
    if any("." in name for name in names):
        random_models.write(folder)
    for name, options in (OPTIONS | OWN).items():
        if name in names:
            write_model(folder / f"{name}.gguf", **options)


def tokens_of(fault: Fault) -> list[int]:
    """The first tokens of a longer run are those of a shorter one."""
    return [1, *np.random.default_rng(65).integers(3, 90, 4096)[: sum(fault.batches) - 1].tolist()]


def write(path: Path, taps: dict[str, np.ndarray], fault: Fault, dump: str) -> None:
    stated = {"schema": "llamadiff.trace/1", "tokens": tokens_of(fault), "batches": fault.batches,
              "producer": {"name": "unknown engine", "settings": {"type_k": "F16", "type_v": "F16"}}}  # fmt: skip
    kept = {name: np.ascontiguousarray(x) for name, x in taps.items() if name.startswith(DUMPS[dump])}
    kept = {name: x.astype(np.int32 if x.dtype.kind == "i" else np.float32) for name, x in kept.items()}
    save_file(kept, path, metadata={"llamadiff": json.dumps(stated)})


def run(model: Path, fault: Fault) -> dict[str, np.ndarray]:
    of_torch = model.name.split(".")[0] in TORCH
    engine: Any = torch_engine.Net(model) if of_torch else numpy_engine.Engine(model)
    fault.put(engine)
    with np.errstate(all="ignore"):
        return engine.run(tokens_of(fault), list(fault.batches))


def first_to_part(model: Path, fault: Fault, dump: str) -> str:
    """The first tap of the dump, in llamadiff's order, whose values the wrong and the right engine do not share."""
    wrong, right = run(model, fault), run(model, _without(fault))
    taps = json.loads(_llamadiff("taps", str(model), "--json").stdout)
    order = [row["tap"] for row in taps if row["tap"] in wrong and row["tap"].startswith(DUMPS[dump])]
    return next(tap for tap in order if not np.array_equal(wrong[tap], right[tap], equal_nan=True))


def _without(fault: Fault) -> Fault:
    return Fault("right", lambda _: None, fault.model, "", "", "", fault.batches)


def _llamadiff(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "llamadiff", *args], capture_output=True, text=True, check=False)


def judge(folder: Path, fault: Fault, dump: str) -> dict[str, Any]:
    """What llamadiff says of the fault's run: a tap, a headline, whether it says more than that the place is wrong."""
    model, file, report = folder / f"{fault.model}.gguf", folder / "mine.safetensors", folder / "report.json"
    report.unlink(missing_ok=True)
    write(file, run(model, fault), fault, dump)
    begun = time.monotonic()
    ended = _llamadiff("compare", str(model), str(file), "--output", f"json:{report}")
    seconds = time.monotonic() - begun
    said = json.loads(report.read_text()) if report.exists() else {}
    first = (said.get("first_divergence") or {}).get("tap")
    headline = said.get("headline", "")
    named = ended.returncode == 1 and "wrong on the inputs" not in headline
    told = {"tap": first, "headline": headline, "named": named}
    return {"code": ended.returncode, "seconds": seconds, "text": ended.stdout + ended.stderr} | told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", choices=tuple(DUMPS), default="whole")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    for flag in ("--kept-back", "--text", "--right", "--check"):
        parser.add_argument(flag, action="store_true")
    asked = parser.parse_args()
    faults: Faults = importlib.import_module(f"proof.unknown.{'kept_back' if asked.kept_back else 'shown'}").FAULTS
    chosen = [fault for fault in faults if not asked.only or fault.name in asked.only]
    if asked.right:
        chosen = [_without(fault) for fault in {(f.model, f.batches): f for f in chosen}.values()]
    with tempfile.TemporaryDirectory() as made:
        write_models(Path(made), {fault.model for fault in chosen})
        if asked.check:
            for fault in chosen:
                first = first_to_part(Path(made) / f"{fault.model}.gguf", fault, "whole")
                print("right" if first == fault.first else "WRONG", fault.name, fault.first, first, flush=True)
        else:
            _measure(Path(made), chosen, asked.dump, text=asked.text)


def _measure(folder: Path, faults: list[Fault], dump: str, *, text: bool) -> None:
    at_tap = named = acquitted = crashed = 0
    for fault in faults:
        said = judge(folder, fault, dump)
        true = fault.first if dump == "whole" else first_to_part(folder / f"{fault.model}.gguf", fault, dump)
        at_tap, named = at_tap + (said["tap"] == true), named + said["named"]
        acquitted += said["code"] == 0
        crashed += said["code"] not in (0, 1, 2)
        print(f"{said['code']}  {fault.name} ({fault.model})  {said['tap']} / {true}  {said['seconds']:.1f} s")
        print(f"     said  {said['headline']}\n     true  {fault.wrong} ({fault.source})", flush=True)
        if text or said["code"] not in (0, 1, 2):
            print(said["text"], flush=True)
    print(f"{len(faults)}, {dump}: {at_tap} at their tap, {named} named, {acquitted} acquitted, {crashed} crashed")


if __name__ == "__main__":
    main()
