"""A producer's settings, and the types of its KV cache, as its trace states them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamadiff.numerics import cpu
from llamadiff.numerics.arithmetic import COMPUTES
from llamadiff.numerics.policies import GELU, NATIVE
from llamadiff.numerics.summing import half_sums
from llamadiff.numerics.types import HALF_STEP
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace


def stored_types(trace: Trace) -> dict[str, str]:
    """The types that K and V rows have in the cache of a trace's producer; float32 unless it says otherwise.

    llama.cpp's flash attention casts a float32 cache to float16 (llama-graph.cpp, build_attn_mha).
    """
    settings = settings_of(trace)
    stated = {side: str(settings.get(f"type_{side}", "F32")) for side in "kv"}
    types = {f"cache_{side}": kind if kind in COMPUTES else kind.upper() for side, kind in stated.items()}
    return {side: "F16" if settings.get("flash_attn") and kind == "F32" else kind for side, kind in types.items()}


def cache_settings(trace: Trace) -> dict[str, str]:
    """The types of the cache, and where the producer says what its CPU does: not as most, how it rounds to eight bits
    (``q8``; UNKNOWN: it was asked, and does not say), adds float16's numbers (``sums``), fills GELU's table (``gelu``).
    """
    settings = settings_of(trace)
    way = cpu.stated_q8_way(settings["q8"]) if "q8" in settings else cpu.AVX
    eight_bits = {"q8": way} if way != cpu.AVX else {}
    sums = _sums(settings.get("sums"), trace.info.producer)
    table = {GELU: cpu.FUSED} if cpu.fuses(str(trace.info.producer.get("build", ""))) else {}
    return stored_types(trace) | eight_bits | table | ({"sums": sums} if sums else {})


def _sums(stated: object, producer: Mapping[str, Any]) -> str:
    """How float16's numbers are added, as stated, or by llama.cpp's line of the CPU's features; "": in float32.

    UNKNOWN where that line says nothing; what engines of others say is theirs.
    """
    in_half = half_sums()
    sums = stated or cpu.sums_of(str(producer.get("build", "")))
    if sums == cpu.UNKNOWN and producer.get("name") != "llama.cpp":
        return cpu.IN_FLOAT
    return str(sums) if sums == cpu.UNKNOWN or (in_half is not None and sums in in_half.ways) else cpu.IN_FLOAT


def computes_in(trace: Trace) -> str:
    """The policy that an engine states as its arithmetic (``compute``); empty where it states none."""
    stated = str(settings_of(trace).get("compute", ""))
    policy = {"ggml": NATIVE, "f32": ""}.get(stated.lower(), stated if stated in COMPUTES else stated.lower())
    if policy and policy not in (NATIVE, *HALF_STEP, *COMPUTES):
        raise UserError(f"settings.compute is {stated!r}: it is ggml, f32, f16, bf16, or one in docs/trace-format.md")
    return policy


def settings_of(trace: Trace) -> dict[str, Any]:
    """What a trace's producer says of its settings."""
    settings = trace.info.producer.get("settings")
    return settings if isinstance(settings, dict) else {}
