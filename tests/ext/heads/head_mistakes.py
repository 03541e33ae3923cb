"""Mistakes of heads, put into an engine that was written by hand: where each must be found, and what must be said."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ext.heads.numpy_head import HEADS, KV_HEADS, LAYERS, SCALE, Head, Step, rms


def before(x: np.ndarray, by: int = 1) -> np.ndarray:
    """Rows of the tokens before; zeros where there are none."""
    return np.concatenate([np.zeros_like(x[:by]), x[:-by]])


def to_int8(x: np.ndarray) -> np.ndarray:
    """Each row in eight bits, with a scale of its own."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    return (np.round(x / scale) * scale).astype(np.float32)


@dataclass(frozen=True)
class Mistake:
    """``steps`` of the engine that are others; ``tap``: where it is; ``words``: what must be said, as one sentence.

    ``head``: the tap where the trunk was not recorded, if that is another, and ``head_words``.
    """

    name: str
    tap: str
    words: str
    steps: dict[str, Step]
    head: str = ""
    head_words: str = ""


def mistake(name: str, tap: str, words: str, head: str = "", head_words: str = "", **steps: Step) -> Mistake:
    return Mistake(name, tap, words, steps, head or tap, head_words or words)


def table(name: str) -> Step:
    return lambda self, tokens: self.w(name)[tokens]


def own_table(self, tokens):
    return self.weight("nextn.embed_tokens")[tokens]


MISTAKES = (
    mistake("hidden state before the norm", "trunk_h_nextn", "is left out: its input comes out as it is", "mtp_h_input",
            handed_over=lambda self, x: x),
    mistake("hidden state of another layer", "trunk_h_nextn", "it reads l_out-0 in the place of l_out-1", "mtp_h_input",
            "takes l_out-0, normalised, not trunk_h_nextn",
            handed_over=lambda self, x: rms(self.taps["l_out-0"], self.w("output_norm.weight"))),
    mistake("hidden state normed again", "mtp_h_input", "normalises trunk_h_nextn once more, by output_norm.weight",
            taken=lambda self, h: before(rms(h, self.w("output_norm.weight")))),
    mistake("hidden state of its own token", "mtp_h_input", "takes the hidden state of the token itself",
            taken=lambda self, h: h),
    mistake("hidden state of two tokens before", "mtp_h_input", "takes the hidden state of the token two before",
            taken=lambda self, h: before(h, 2)),
    mistake("first hidden state not zero", "mtp_h_input", "gives the first token its own hidden state, not zeros",
            taken=lambda self, h: np.concatenate([h[:1], h[:-1]])),
    mistake("hidden state in eight bits", "mtp_h_input", "rounds hidden states to 8 bits",
            taken=lambda self, h: before(to_int8(h))),
    mistake("halves in the other order", "mtp_concat-2", "joins mtp_hnorm-2 before mtp_enorm-2",
            joined=lambda self, e, h: np.concatenate([h, e], axis=-1)),
    mistake("one half twice", "mtp_concat-2", "joins mtp_hnorm-2 twice",
            joined=lambda self, e, h: np.concatenate([h, h], axis=-1)),
    mistake("hnorm with enorm's weight", "mtp_hnorm-2", "uses blk.2.nextn.enorm.weight for blk.2.nextn.hnorm.weight",
            hnorm=lambda self, x: rms(x, self.weight("nextn.enorm"))),
    mistake("enorm with hnorm's weight", "mtp_enorm-2", "uses blk.2.nextn.hnorm.weight for blk.2.nextn.enorm.weight",
            enorm=lambda self, x: rms(x, self.weight("nextn.hnorm"))),
    mistake("hnorm left out", "mtp_hnorm-2", "is left out: its input comes out as it is", hnorm=lambda self, x: x),
    mistake("enorm left out", "mtp_enorm-2", "is left out: its input comes out as it is", enorm=lambda self, x: x),
    mistake("the trunk's norm before the logits", "h_nextn",
            "uses output_norm.weight for blk.2.nextn.shared_head_norm.weight",
            head_norm=lambda self, x: rms(x, self.w("output_norm.weight"))),
    mistake("no norm before the logits", "h_nextn", "is left out: its input comes out as it is",
            head_norm=lambda self, x: x),
    mistake("the next token's embedding", "mtp_tok_embd-2", "reads the next token's row of blk.2.nextn.embed_tokens",
            embedded=lambda self, t: own_table(self, np.append(t[1:], t[-1]))),
    mistake("the embedding of the token before", "mtp_tok_embd-2",
            "reads the token before's row of blk.2.nextn.embed_tokens",
            embedded=lambda self, t: own_table(self, np.append(t[:1], t[:-1]))),
    mistake("the trunk's embedding", "mtp_tok_embd-2",
            "reads rows of token_embd.weight, not blk.2.nextn.embed_tokens.weight",
            embedded=table("token_embd.weight")),
    mistake("the trunk's matrix of logits", "result_output",
            "multiplies by output.weight, not blk.2.nextn.shared_head_head.weight",
            logits=lambda self, x: x @ self.w("output.weight").T),
    mistake("positions from 1", "mtp_Qcur-2", "rotates by the position + 1",
            positions=lambda self, n: np.arange(n) + (self.layer == LAYERS)),
    mistake("residuals not added", "mtp_ffn_inp-2", "leaves out mtp_eh_proj-2: attn_out-2 goes on alone",
            residual=lambda self, branch, x: branch),
)  # fmt: skip


def in_head(right: Step, other: Step) -> Step:
    """A step that is another in the head's layer alone."""
    return lambda self, *given: (other if self.layer == LAYERS else right)(self, *given)


def by_turns(self, q, k, v):
    """Query heads read the KV heads by turns."""
    order = np.arange(HEADS).reshape(KV_HEADS, -1).T.ravel()
    return Head.attended(self, q[:, np.argsort(order)], k, v)[:, order]


# What was thought of when nothing of what looks for mistakes was changed any more but for two sentences.
LATER = (
    mistake("no mask", "attn_out-2", "has no causal mask: every token sees all others",
            seen=in_head(Head.seen, lambda self, n: np.ones((n, n), bool))),
    mistake("the first key is not seen", "attn_out-2", "hides the first token's key from all later ones",
            seen=in_head(Head.seen, lambda self, n: np.tril(np.ones((n, n), bool)) & ~np.eye(n, k=0, dtype=bool)[:1]
                         | np.eye(n, dtype=bool))),
    mistake("a window of 4", "attn_out-2", "sees no more than 4 keys",
            seen=in_head(Head.seen, lambda self, n: np.triu(np.tril(np.ones((n, n), bool)), -3))),
    mistake("another layer's norm", "attn_norm-2", "uses blk.1.attn_norm.weight for blk.2.attn_norm.weight",
            attn_norm=lambda self, x: rms(x, self.w("blk.1.attn_norm.weight"))),
    mistake("the hidden half is zero", "mtp_concat-2", "joins zeros in the place of mtp_hnorm-2",
            joined=lambda self, e, h: np.concatenate([e, 0 * h], axis=-1)),
    mistake("hnorm as LayerNorm", "mtp_hnorm-2", "subtracts the mean, as LayerNorm does",
            hnorm=lambda self, x: rms(x - x.mean(-1, keepdims=True), self.weight("nextn.hnorm"))),
    mistake("experts are not scaled", "mtp_ffn_moe_out-2", "does not multiply by 1.5",
            experts=in_head(Head.experts, lambda self, x: Head.experts(self, x) / SCALE)),
    mistake("the residual is what was taken", "mtp_ffn_inp-2", "adds mtp_h_input, not mtp_eh_proj-2",
            residual=lambda self, branch, x: branch + (
                x if "mtp_ffn_inp-2" in self.taps else self.taps["mtp_h_input"])),
    mistake("logits of the row before", "result_output", "gives the logits of the token before",
            logits=lambda self, x: Head.logits(self, np.concatenate([x[:1], x[:-1]]))),
    mistake("scores are scaled by the root", "attn_out-2", "scales by the root of the scale",
            attended=in_head(Head.attended, lambda self, q, k, v: Head.attended(self, q * np.float32(2), k, v))),
    mistake("KV heads by turns", "attn_out-2", "reads KV head h % 2 for query head h",
            attended=in_head(Head.attended, by_turns)),
    mistake("the last token's hidden state", "mtp_h_input", "takes the hidden state of the last token for every token",
            taken=lambda self, h: np.broadcast_to(h[-1], h.shape).copy()),
    mistake("the next id's embedding", "mtp_tok_embd-2", "reads the rows of blk.2.nextn.embed_tokens.weight off by +1",
            embedded=lambda self, t: own_table(self, t + 1)),
)  # fmt: skip
