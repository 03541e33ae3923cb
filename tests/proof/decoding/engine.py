"""A stranger's llama that runs tokens in batches through a KV cache, and generates greedily. Run as a program it dumps.

Nothing of llamadiff is used. A cache has slots; a batch writes its rows into some of them and then reads some.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from proof.strangers.model import File, read

Array = np.ndarray
PREFILL, CHUNKS, SINGLY = "prefill", "chunks", "singly"  # how a prompt is fed: at once, by threes, one by one
SIZES = {CHUNKS: 3, SINGLY: 1}


class Engine:
    """Runs one file. Its methods are what a bug replaces."""

    def __init__(self, file: File, room: int) -> None:
        self.file, self.h, self.room = file, file.hyper, room
        self.taps: dict[str, list[Array]] = {}
        shape = (self.h.layers, 2 * room, self.h.kv_heads, self.h.dim)
        self.k, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.first = 0  # tokens of the first batch
        self.batches: list[int] = []

    # -- what may go wrong -----------------------------------------------------------------------------------------

    def positions(self, start: int, stop: int) -> Array:
        return np.arange(start, stop)

    def slots(self, start: int, stop: int) -> Array:
        """Where a batch's rows are written."""
        return np.arange(start, stop)

    def written(self, rows: Array) -> Array:
        """A batch's rows as they are written."""
        return rows

    def seen(self, start: int, stop: int) -> int:
        """How many slots a batch reads."""
        return stop

    def layer_read(self, layer: int) -> int:
        return layer

    def kept(self, k: Array, rotated: Array) -> Array:
        """What of K goes into the cache."""
        return rotated

    def keys(self, k: Array) -> Array:
        """K as it was read from the cache: [slot, head, dim]."""
        return k

    def values(self, v: Array) -> Array:
        return v

    def fed(self, tokens: Sequence[int], start: int) -> Sequence[int]:
        return tokens

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self, tokens: Sequence[int], sizes: Sequence[int]) -> Array:
        """Feed tokens in batches of these sizes -> the last row's logits."""
        start, logits = sum(self.batches), np.zeros(0)
        for size in sizes:
            self.first = self.first or size
            logits = self.batch(tokens[:size], start)
            self.batches.append(size)
            tokens, start = tokens[size:], start + size
        return logits

    def generate(self, prompt: Sequence[int], how: str, count: int) -> list[int]:
        """Feed a prompt, then what it finds likeliest, one by one -> all tokens."""
        tokens = list(prompt)
        logits = self.run(tokens, sizes_of(len(tokens), how))
        for _ in range(count):
            tokens.append(int(logits.argmax()))
            logits = self.run(tokens[-1:], [1])
        return tokens

    def tap(self, name: str, x: Array) -> Array:
        self.taps.setdefault(name, []).append(x)
        return x

    def batch(self, tokens: Sequence[int], start: int) -> Array:
        x = self.tap("embd", self.file["token_embd.weight"][list(self.fed(tokens, start))])
        for layer in range(self.h.layers):
            x = self.layer(x, layer, start)
        y = self.tap("result_norm", self.norm(x, "output_norm"))
        head = "output" if "output.weight" in self.file else "token_embd"
        return self.tap("result_output", y @ self.file[f"{head}.weight"].T)[-1]

    def layer(self, x: Array, i: int, start: int) -> Array:
        y = self.tap(f"attn_norm-{i}", self.norm(x, f"blk.{i}.attn_norm"))
        x = self.tap(f"ffn_inp-{i}", x + self.attention(y, i, start))
        y = self.tap(f"ffn_norm-{i}", self.norm(x, f"blk.{i}.ffn_norm"))
        gate, up = (self.tap(f"ffn_{w}-{i}", self.product(y, f"blk.{i}.ffn_{w}")) for w in ("gate", "up"))
        y = self.tap(f"ffn_swiglu-{i}", gate / (1 + np.exp(-gate)) * up)
        return self.tap(f"l_out-{i}", x + self.tap(f"ffn_out-{i}", self.product(y, f"blk.{i}.ffn_down")))

    def attention(self, y: Array, i: int, start: int) -> Array:
        stop, d = start + len(y), self.h.dim
        q, k, v = (self.tap(f"{s.upper()}cur_proj-{i}", self.product(y, f"blk.{i}.attn_{s}")) for s in "qkv")
        q, k, v = (part.reshape(len(y), -1, d) for part in (q, k, v))
        where = self.positions(start, stop)
        rotated = self.tap(f"Kcur_rope-{i}", self.rope(k, where))
        q = self.tap(f"Qcur_rope-{i}", self.rope(q, where))
        for cache, rows in ((self.k, self.kept(k, rotated)), (self.v, v)):
            cache[i, self.slots(start, stop)] = self.written(rows)
        other, count = self.layer_read(i), self.seen(start, stop)
        keys, values = self.keys(self.k[other, :count]), self.values(self.v[other, :count])
        mixed = self.tap(f"kqv_out-{i}", self.mixed(q, keys, values, i, start))
        return self.tap(f"attn_out-{i}", self.product(mixed, f"blk.{i}.attn_output"))

    def mixed(self, q: Array, keys: Array, values: Array, i: int, start: int) -> Array:
        """Softmax of the scores, and the sums of values that it gives: [query, head * dim]."""
        group = self.h.heads // self.h.kv_heads
        kq = np.einsum("qhd,khd->hqk", q, keys.repeat(group, axis=1))
        self.tap(f"kq-{i}", kq)
        hidden = np.arange(len(keys)) > np.arange(start, start + len(q))[:, None]
        x = np.where(hidden, -np.inf, kq / np.sqrt(self.h.dim))
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        p = self.tap(f"kq_soft_max-{i}", e / e.sum(axis=-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", p, values.repeat(group, axis=1)).reshape(len(q), -1)

    def norm(self, x: Array, stem: str) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.h.eps) * self.file[f"{stem}.weight"]

    def product(self, x: Array, stem: str) -> Array:
        return x @ self.file[f"{stem}.weight"].T

    def rope(self, x: Array, positions: Array) -> Array:
        """Neighbours rotated: x [token, head, dim]."""
        n = self.h.n_rot
        angle = (positions[:, None] * self.h.base ** (-np.arange(0, n, 2) / n))[:, None]
        a, b, out = x[..., 0:n:2], x[..., 1:n:2], x.copy()
        out[..., 0:n:2] = a * np.cos(angle) - b * np.sin(angle)
        out[..., 1:n:2] = b * np.cos(angle) + a * np.sin(angle)
        return out


def sizes_of(count: int, how: str) -> list[int]:
    """The batches of a prompt."""
    each = SIZES.get(how, count)
    return [min(each, count - start) for start in range(0, count, each)]


def recorded(engine: Engine) -> dict[str, Array]:
    """What all batches recorded, tap by tap; scores in as many columns as there are tokens."""
    count = sum(engine.batches)
    return {name: _joined(name, parts, count).astype(np.float32) for name, parts in engine.taps.items()}


def _joined(name: str, parts: list[Array], count: int) -> Array:
    if not name.startswith(("kq-", "kq_soft_max-")):
        return np.concatenate(parts)
    return np.concatenate([np.pad(p, ((0, 0), (0, 0), (0, count - p.shape[2]))) for p in parts], axis=1)


def save(path: Path, engine: Engine, tokens: Sequence[int], n_prompt: int) -> Path:
    """A trace that says in which batches its tokens were run."""
    facts = {"schema": "llamadiff.trace/1", "tokens": [int(t) for t in tokens], "n_prefill": n_prompt,
             "batches": engine.batches, "producer": {"name": "mine"}}  # fmt: skip
    header: dict[str, object] = {"__metadata__": {"llamadiff": json.dumps(facts)}}
    end, parts = 0, []
    for name, x in recorded(engine).items():
        header[name] = {"dtype": "F32", "shape": x.shape, "data_offsets": [end, end + x.nbytes]}
        parts.append(x.tobytes())
        end += x.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return path


def main() -> None:
    """``--prompt 1,2,3 --n-predict 4``: generate, and write a trace to ``--out``."""
    from proof.decoding.bugs import ENGINES

    parser = argparse.ArgumentParser()
    for name in ("--model", "--prompt", "--n-predict", "--how", "--bug", "--out"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    prompt = [int(token) for token in given.prompt.split(",")]
    count = int(given.n_predict)
    engine = ENGINES[given.bug](read(Path(given.model)), len(prompt) + count)
    save(Path(given.out), engine, engine.generate(prompt, given.how, count), len(prompt))


if __name__ == "__main__":
    main()
