"""Comparisons that are made up, of every shape that a report may have to show."""

from __future__ import annotations

import math
from dataclasses import replace

from llamadiff.engines.select import GRAPH, EngineUsed
from llamadiff.judge.fact import Fact
from llamadiff.judge.finding import Local
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import MATCH, NOISE, UNCHECKED, WRONG, of_node, worst_of
from llamadiff.numerics import metrics
from llamadiff.result.comparison import Comparison
from llamadiff.result.coverage import Coverage, Ignored
from llamadiff.result.diagnosis import Cause, Diagnosis
from llamadiff.result.logits import Logits, TopToken
from llamadiff.result.rows import Row
from llamadiff.words.advice import next_steps
from llamadiff.words.summary import summarize

HOSTILE = "\x1b[31mred\x1b[0m\x07\r\n[bold]x[/bold]\u202egnp.exe\u2066\x9b2J\ud800[/]"
DENSE = ("attn_norm", "Qcur_rope", "Kcur_rope", "kq_soft_max", "ffn_inp", "ffn_swiglu", "l_out")
EXPERTS = ("attn_norm", "ffn_moe_weights_norm", "ffn_moe_down", "l_out")

MODEL = {"file": "tiny.gguf", "architecture": "llama", "layers": 2, "embd": 64, "heads": 8, "kv_heads": 4,
         "vocab": 512, "weight_types": {"F32": 7, "Q4_K": 12}, "sha256": "5a" * 32}  # fmt: skip


def local(nmse: float = 1e-14, limit: float = 1e-10, arithmetic: str = "F32", span: tuple[str, ...] = ()) -> Local:
    verdict = of_node(nmse, limit).verdict
    return Local(nmse, arithmetic, limit, 10 * limit, verdict, 0, (0, 0), 1.0, 2.0, (nmse,), span)


def difference(nmse: float, cosine: float = 1.0) -> metrics.Difference:
    return metrics.Difference(nmse, cosine, 0.1, 0.0, metrics.Worst(0, (0, 0), 1.0, 2.0), (nmse,))


def stats(rms: float = 0.0412, mean: float = -0.0412, nan: int = 0, inf: int = 0) -> metrics.Stats:
    return metrics.Stats(rms, mean, -12.3, 123.4, nan, inf)


def row(tap: str, its: Local | None = None, drift: float | None = 1.1e-4, ratio: float | None = 1.0) -> Row:
    word, _, layer = tap.rpartition("-")
    own = its if its is not None else local()
    return Row(
        tap=tap, layer=int(layer) if word else None, op="ROPE" if "rope" in tap else "MUL_MAT_ID",
        weight="blk.0.attn_q.weight", weight_type="Q4_K", shape=(4, 8), verdict=own.verdict, local=own,
        baseline_local=None, drift=None if drift is None else difference(drift), expected_drift=1e-4,
        ratio_to_noise=ratio, baseline=stats(), candidate=stats(-0.0413),
    )  # fmt: skip


def rows(
    layers: int, words: tuple[str, ...] = DENSE, wrong: tuple[str, ...] = (), arithmetic: str = "F32"
) -> list[Row]:
    taps = ["embd", *(f"{word}-{i}" for i in range(layers) for word in words), "result_norm", "result_output"]
    return [row(tap, local(0.27 if tap in wrong else 1e-14, arithmetic=arithmetic)) for tap in taps]


def logits(agree: bool = True, text: str | None = " Once", value: float = 12.5, count: int = 10) -> Logits:
    top = tuple(TopToken(i + 1, 400 + i, text, value - i, value - i - 0.25, i + 1 + (not agree)) for i in range(count))
    return Logits(2.4e-1, agree, 2.11, 8, 9, top, top[::-1])


def comparison(its: list[Row], **fields: object) -> Comparison:
    verdict = worst_of([one.verdict for one in its])
    plain = Comparison(
        verdict=verdict, headline="RoPE, layer 1: wrong on the inputs it was given",
        proof=("Qcur_rope-1: own error 2.7e-01, limit 1e-10", "every other op is right: 66 taps were judged"),
        rows=tuple(its), missing=(),
        model=MODEL,
        tokens=((1, "<s>"), (403, " Once"), (407, " upon")), n_prefill=3,
        baseline={"name": "llama.cpp", "version": "b9", "settings": {"type_k": "F32", "flash_attn": False}},
        candidate={"name": "my-engine", "version": "0.3"}, logits=logits(),
        timing={"capture_s": 0.41, "engine_s": 0.06, "compare_s": 0.02, "total_s": 0.5, "peak_rss_mb": 48.4},
        next_steps=("compare your rotation with the model's: pairs (2i, 2i+1) or halves (i, i+n/2), base, scaling",),
    )  # fmt: skip
    return replace(plain, **fields)  # type: ignore[arg-type]


def summarized(its: Comparison) -> Comparison:
    """The same with what is said of it."""
    said = summarize(its.verdict, its, its)
    steps = next_steps(its.verdict, its, its.is_engine)
    return replace(its, headline=said.headline, proof=said.clauses, next_steps=steps)


def explained(its: list[Row], wrong: set[str], *others: Diagnosis, **fields: object) -> Comparison:
    """A run with one known bug, its sentence as long as such sentences get, and logits that disagree."""
    cause = Cause(
        "rope-layout", "rotates (i, i+32); this model needs (2i, 2i+1)",
        "rotate the other layout; GGUF files of llama permute the rows of Q and K for (2i, 2i+1)",
        "TinyLlama#24, llama.cpp#22611, candle#3410, imp#503", 0.0,
    )  # fmt: skip
    taps = {row.tap: 0.0 for row in its if row.tap in wrong}
    diagnosis = Diagnosis(next(iter(taps)), taps, dict.fromkeys(taps, 0.41), (cause,))
    return summarized(comparison(its, **{"diagnosis": (diagnosis, *others), "logits": logits(False), **fields}))


def hostile(text: str) -> Comparison:
    """A run all of whose foreign texts are this one."""
    bad = row("l_out-0", local(0.27, arithmetic=text, span=(text,)))
    return comparison(
        [replace(bad, tap=f"{text}-0", op=text, weight=text, baseline_local=local(0.5))], headline=text,
        proof=(text,), missing=(text,), tokens=((1, text),), candidate={"name": {text: 1}, "settings": text},
        model={"file": text, "architecture": [text], "layers": text, "weight_types": {text: text}},
        baseline={"name": text, "version": text, "settings": {"type_k": text}}, logits=logits(False, text, count=2),
        only_baseline_read=(text,), only_engine_read=(text,), next_steps=(text,),
    )  # fmt: skip


FEW = ("attn_norm", "Qcur_rope", "ffn_out")
MIXED = [
    row("embd"), row("Qcur_rope-0", local(0.27)), replace(row("ffn_up-0", local(0.5)), misrecorded=True),
    row("ffn_out-0", replace(local(0.1), facts=(Fact("where", "only token 2 is wrong"),))), row("l_out-0"),
]  # fmt: skip
UNKNOWN = Diagnosis("ffn_out-0", {"ffn_out-0": 0.1}, {"ffn_out-0": 0.1}, (), known_bugs=99)
INFINITE = [
    row("ffn_out-0", replace(local(), not_finite=15, nmse=math.inf, recorded=math.inf, verdict=WRONG), math.inf, None),
    row("kq-1", replace(local(), nmse=math.nan, opened=2, per_token=(math.nan,), verdict=UNCHECKED), math.nan, None),
]  # fmt: skip
INFINITE = [replace(row, candidate=stats(0.0, 0.0, nan=12, inf=3)) for row in INFINITE]
SPANS = [
    row("embd"), *(replace(row(name), misrecorded=True) for name in ("kq-1", "kq-2", "kq_soft_max-2")),
    *(row(f"kqv_out-{i}", local(span=(f"kq-{i}", f"kq_soft_max-{i}"))) for i in range(3)),
    *(row(f"kqv_out-{i}", local(span=tuple(f"{word}-{i}" for word in DENSE[:-1]))) for i in (4, 5)),
]  # fmt: skip
DECODED = replace(local(0.27), per_token=(0.0, 0.0, 0.8))
STEPS = [replace(one, local=DECODED if one.tap == "Qcur_rope-1" else one.local)
         for one in rows(2, FEW, ("Qcur_rope-1",))]  # fmt: skip
NODES = [
    replace(row(tap), layer=layer) for tap, layer in (
        ("embd", None), ("a-0", 0), ("between", None), ("b-1", 1), ("c-0", 0), ("d-1", 1), ("result_output", None))
]  # fmt: skip
UNUSUAL = {"type_k": "Q8_0", "type_v": "f32", "flash_attn": True, "repack": True, "gpu_layers": 0}
IGNORED = Ignored(2, (("l_ouf-0", "l_out-0"), ("x", None)))
# What a report may be about, each small: their texts are kept (test_kept.py), and reviewed.
REPORTS = {
    "right": summarized(comparison(rows(2, FEW))),
    "wrong RoPE": explained(
        [replace(one, drift=difference(0.5)) for one in rows(3, FEW, ("Qcur_rope-1", "Qcur_rope-2"))],
        {"Qcur_rope-1", "Qcur_rope-2"},
    ),
    "quantized": summarized(comparison(
        [row("embd"), row("ffn_out-0", replace(local(5e-10), hides=1e-9)), row("l_out-0", local(9e-13, limit=1e-12))],
        verdict=NOISE, baseline={"name": "llama.cpp", "settings": UNUSUAL}, logits=None,
    )),
    "unchecked": summarized(comparison(
        [replace(one, drift=None, ratio_to_noise=None) for one in rows(1, FEW)[:-2]], verdict=UNCHECKED, logits=None,
        candidate={"name": "the candidate"}, model={**MODEL, "layers": 1},
        coverage=Coverage(4, 39, "result_output", False, False, IGNORED),
    )),
    "several causes": explained(MIXED, {"Qcur_rope-0"}, UNKNOWN, logits=None),
    "not finite": summarized(comparison(
        INFINITE, logits=replace(logits(value=math.nan), kl=math.nan, margin=math.inf, not_finite=("candidate",)),
    )),
    "missing taps": summarized(comparison(
        SPANS, missing=("kq-0",), extra=("x",), logits=replace(logits(count=0), kl=math.nan, margin=math.inf),
    )),
    "wrong tokens": summarized(comparison(
        [], verdict=WRONG, logits=None, tokens=((1, "<s>"), (15043, None)),
        preflight=(Check("tokens", WRONG, "the candidate ran other tokens: from token 1 on"), Check("w", MATCH, "")),
    )),
    "decode steps": explained(
        STEPS, {"Qcur_rope-1"}, n_prefill=2, batches=(2, 1), prompt="Once", logits=logits(False, count=2),
        arithmetics={"Q4_K": "Q8_K"}, missing=("kq-0", "kq-1"), only_baseline_read=("rope_freqs.weight",),
        only_engine_read=("output.bias",),
    ),
    "a server": summarized(comparison(
        [replace(row("result_output"), local=None, verdict=UNCHECKED)], verdict=UNCHECKED,
        logits=replace(logits(False, None, count=2), partial=True),
        candidate={"name": "llama-server", "machine": "aarch64"},
    )),
    "a graph": summarized(comparison(
        NODES, engine=EngineUsed(GRAPH, "no such architecture: xverse"), logits=None, is_engine=True
    )),
    "baseline off": summarized(comparison(
        [replace(one, baseline_local=local(0.5 if one.tap == "ffn_out-1" else 0.0)) for one in rows(2, FEW)],
        logits=None, blamed=("ffn_out-1",), verdict=WRONG,
    )),
    "hostile": hostile("\x1b[2J\n|`<b>@x[r]\ud800"),
}  # fmt: skip
SHAPES = {
    **REPORTS,
    "eighty layers, rounded": comparison(rows(80, wrong=("Qcur_rope-47",), arithmetic="Q8_K"), logits=None),
    "experts, rounded": comparison(rows(31, EXPERTS, wrong=("ffn_moe_weights_norm-30",), arithmetic="Q8_K")),
    "experts match": comparison(rows(31, EXPERTS, arithmetic="Q8_0")),
    "huge": comparison([replace(one, baseline=stats(1.23e30, -1.2e-30), ratio_to_noise=3e112) for one in rows(31)]),
    "empty": comparison([]),
    "wide texts": comparison(
        rows(2), tokens=((9, "日本語のテキスト"), (10, "🦙🦙"), (11, "é")) * 9, logits=logits(text="日本🦙")
    ),
    "long texts": comparison(rows(2), tokens=((9, "x" * 900), (10, "日" * 900)), logits=logits(text="日" * 900)),
    "long and hostile": hostile(HOSTILE * 9),
}
