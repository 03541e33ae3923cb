"""Comparisons that are made up, of every shape that a report may have to show."""

from __future__ import annotations

from dataclasses import replace

from llamadiff.judge.finding import Local
from llamadiff.judge.verdict import UNCHECKED, of_node, worst_of
from llamadiff.numerics import metrics
from llamadiff.result.comparison import Comparison
from llamadiff.result.diagnosis import Cause, Diagnosis
from llamadiff.result.logits import Logits, TopToken
from llamadiff.result.rows import Row
from llamadiff.words.advice import next_steps
from llamadiff.words.blame import blame

HOSTILE = "\x1b[31mred\x1b[0m\x07\r\n[bold]x[/bold]\u202egnp.exe\u2066\x9b2J\ud800[/]"
DENSE = ("attn_norm", "Qcur_rope", "Kcur_rope", "kq_soft_max", "ffn_inp", "ffn_swiglu", "l_out")
EXPERTS = ("attn_norm", "ffn_moe_weights_norm", "ffn_moe_down", "l_out")


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


def logits(agree: bool = True, text: str | None = " Once", value: float = 12.5) -> Logits:
    top = tuple(TopToken(i + 1, 400 + i, text, value - i, value - i - 0.25, i + 1 + (not agree)) for i in range(10))
    return Logits(2.4e-1, agree, 2.11, 8, 9, top, top[::-1])


def comparison(its: list[Row], **fields: object) -> Comparison:
    verdict = worst_of([one.verdict for one in its])
    plain = Comparison(
        verdict=verdict, headline="RoPE, layer 1: wrong on the inputs it was given",
        proof=("Qcur_rope-1: own error 2.7e-01, limit 1e-10", "every other op is right: 66 taps were judged"),
        rows=tuple(its), missing=(),
        model={"file": "tiny.gguf", "architecture": "llama", "layers": 2, "embd": 64, "heads": 8, "kv_heads": 4,
               "vocab": 512, "weight_types": {"F32": 7, "Q4_K": 12}},
        tokens=((1, "<s>"), (403, " Once"), (407, " upon")), n_prefill=3,
        baseline={"name": "llama.cpp", "version": "b9", "settings": {"type_k": "F32", "flash_attn": False}},
        candidate={"name": "my-engine", "version": "0.3"}, logits=logits(),
        timing={"capture_s": 0.41, "engine_s": 0.06, "total_s": 0.5, "peak_rss_mb": 48.4},
        next_steps=("compare your rotation with the model's: pairs (2i, 2i+1) or halves (i, i+n/2), base, scaling",),
    )  # fmt: skip
    return replace(plain, **fields)  # type: ignore[arg-type]


def explained(its: list[Row], wrong: set[str]) -> Comparison:
    """A run with one known bug, its sentence as long as such sentences get, and logits that disagree."""
    cause = Cause(
        "rope-layout", "rotates (i, i+32); this model needs (2i, 2i+1)",
        "rotate the other layout; GGUF files of llama permute the rows of Q and K for (2i, 2i+1)",
        "TinyLlama#24, llama.cpp#22611, candle#3410, imp#503", 0.0,
    )  # fmt: skip
    taps = {row.tap: 0.0 for row in its if row.tap in wrong}
    diagnosis = Diagnosis(next(iter(taps)), taps, dict.fromkeys(taps, 0.41), (cause,))
    said = blame(its, [diagnosis], "mine", "", gaps=False)
    plain = comparison(its, diagnosis=(diagnosis,), logits=logits(False), headline=said.headline, proof=said.clauses)
    return replace(plain, next_steps=next_steps("wrong", plain, False))


WRONG = comparison(rows(3, wrong=("Qcur_rope-1", "Kcur_rope-1", "Qcur_rope-2")))
MATCH = comparison(rows(3))
SHAPES = {
    "match": MATCH,
    "wrong": WRONG,
    "eighty layers, rounded": comparison(rows(80, wrong=("Qcur_rope-47",), arithmetic="Q8_K")),
    "experts, rounded": comparison(rows(31, EXPERTS, wrong=("ffn_moe_weights_norm-30",), arithmetic="Q8_K")),
    "experts match": comparison(rows(31, EXPERTS, arithmetic="Q8_0")),
    "huge": comparison([replace(one, baseline=stats(1.23e30, -1.2e-30), ratio_to_noise=3e112) for one in rows(31)]),
    "empty": comparison([]),
    "disagree": comparison(rows(2), logits=logits(False)),
    "wide texts": comparison(
        rows(2), tokens=((9, "日本語のテキスト"), (10, "🦙🦙"), (11, "é")) * 9, logits=logits(text="日本🦙")
    ),
    "long texts": comparison(rows(2), tokens=((9, "x" * 900), (10, "日" * 900)), logits=logits(text="日" * 900)),
    "hostile": comparison(
        rows(2), headline=HOSTILE * 9, proof=(HOSTILE * 9,), tokens=((1, HOSTILE),), candidate={"name": HOSTILE * 9}
    ),
    "unchecked": comparison([replace(one, verdict=UNCHECKED, local=None) for one in rows(2)]),
}
