"""Mistakes of heads, put into an engine that was written by hand: where each must be found, and what must be said."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ext.heads.numpy_head import LAYERS, Step, rms


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
            "reads rows of token_embd.weight, not blk.2.nextn.embed_tokens.weight", embedded=table("token_embd.weight")),
    mistake("the trunk's matrix of logits", "result_output",
            "multiplies by output.weight, not blk.2.nextn.shared_head_head.weight",
            logits=lambda self, x: x @ self.w("output.weight").T),
    mistake("positions from 1", "mtp_Qcur-2", "rotates by the position + 1",
            positions=lambda self, n: np.arange(n) + (self.layer == LAYERS)),
    mistake("residuals not added", "mtp_ffn_inp-2", "leaves out mtp_eh_proj-2: attn_out-2 goes on alone",
            residual=lambda self, branch, x: branch),
)  # fmt: skip
