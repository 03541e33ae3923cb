"""A stranger's engine that runs tokens in batches through its cache, and generates greedily. Run as a program it dumps.

Nothing of llamadiff is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from proof.strangers import recording
from proof.strangers.arithmetic import BY_NAME
from proof.strangers.engine import NONE, Array, Bug, Engine
from proof.strangers.model import File, read

PREFILL, CHUNKS, SINGLY = "prefill", "chunks", "singly"  # how a prompt is fed: at once, by threes, one by one
SIZES = {CHUNKS: 3, SINGLY: 1}


class Generating(Engine):
    """Runs one file, in batches as they come; ``room``: how many tokens there will be."""

    def __init__(self, file: File, room: int, bug: Bug = NONE) -> None:
        super().__init__(file, BY_NAME["float32"], bug)
        self.room = room
        self.batches: list[int] = []

    def feed(self, tokens: Sequence[int], sizes: Sequence[int]) -> Array:
        """Tokens in batches of these sizes -> the last row's logits."""
        logits = np.zeros(0)
        for size in sizes:
            if not self.batches:
                self.begin(size)
            self.batches.append(size)
            logits, tokens = self.step(tokens[:size])[-1], tokens[size:]
        return logits

    def generate(self, prompt: Sequence[int], how: str, count: int) -> list[int]:
        """Feed a prompt, then what it finds likeliest, one by one -> all tokens."""
        tokens = list(prompt)
        logits = self.feed(tokens, sizes_of(len(tokens), how))
        for _ in range(count):
            tokens.append(int(logits.argmax()))
            logits = self.feed(tokens[-1:], [1])
        return tokens

    def looked_up(self, q: Array, keys: Array, values: Array) -> Array:
        for side, rows in (("k", keys), ("v", values)):  # the cache as it is read, which is what a bug spoils
            empty = np.zeros((self.stop - len(rows), *rows.shape[1:]), rows.dtype)
            self.recorded[f"kv_{side}-{self.layer}"] = [np.concatenate([rows, empty])]
        return super().looked_up(q, keys, values)


def sizes_of(count: int, how: str) -> list[int]:
    """The batches of a prompt."""
    each = SIZES.get(how, count)
    return [min(each, count - start) for start in range(0, count, each)]


def save(path: Path, engine: Generating, tokens: Sequence[int], n_prompt: int, cache: bool = False) -> Path:
    """A trace that says in which batches its tokens were run."""
    taps = engine.taps() if cache else recording.without_cache(engine.taps())
    return recording.save(path, taps, tokens, n_prompt, name="mine", batches=engine.batches)


def main() -> None:
    """``--prompt 1,2,3 --n-predict 4``: generate, and write a trace to ``--out``."""
    from proof.decoding.bugs import DECODING

    parser = argparse.ArgumentParser()
    for name in ("--model", "--prompt", "--n-predict", "--how", "--bug", "--out"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    prompt = [int(token) for token in given.prompt.split(",")]
    count = int(given.n_predict)
    engine = Generating(read(Path(given.model)), len(prompt) + count, DECODING[given.bug])
    save(Path(given.out), engine, engine.generate(prompt, given.how, count), len(prompt))


if __name__ == "__main__":
    main()
