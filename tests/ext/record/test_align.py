"""An engine's values are found in what it wrote: here the writes of an engine in NumPy, as a recorder logs them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from llamaref import Engine, Tap, ops
from models.small import write_model

from llamadiff.engines.reference_model import Model
from llamadiff.ext.record.align import align
from llamadiff.ext.record.changes import Span
from llamadiff.ext.record.log import Log, LogWriter
from llamadiff.ext.record.search import DTYPES, Memory, Search

TOKENS = (1, 17, 5, 80, 42, 9)
STORED = {
    "f32": lambda x: x.astype("<f4").tobytes(),
    "f64": lambda x: x.astype("<f8").tobytes(),
    "f16": lambda x: x.astype("<f2").tobytes(),
    "bf16": lambda x: (np.ascontiguousarray(x, "<f4").view("<u4") + 0x8000 >> 16).astype("<u2").tobytes(),
}
HEAP = 0x10000


class Writes(Tap):
    """A program that keeps each kind of value in a buffer of its own, for all layers, in some dtype and order."""

    def __init__(
        self,
        log: LogWriter,
        dtype: str,
        halves: int = 0,
        last_only: bool = False,
        logits: float = 1,
        nowhere: Collection[str] = (),
    ) -> None:
        """``halves``: the width of heads that are kept as two halves; ``last_only``: what the last layer's attention is
        followed by is there for the last token alone; ``logits``: a factor of theirs; ``nowhere``: words of taps that
        are not stored.
        """
        self._log, self._dtype, self._halves = log, dtype, halves
        self._last_only, self._logits, self._nowhere = last_only, logits, nowhere
        self._buffers: dict[str, int] = {}

    def __call__(self, name, x):
        word = name.partition("-")[0]
        if (word.startswith("kq") and word != "kqv_out") or word in self._nowhere:
            return x
        own = x[0]
        if self._halves and word in ("Qcur_proj", "Kcur_proj", "Qcur_rope", "Kcur_rope"):
            heads = own.reshape(len(own), -1, self._halves)
            own = np.concatenate([heads[..., 0::2], heads[..., 1::2]], axis=-1)
        if self._last_only and (name.startswith("result_") or name in ("ffn_out-1", "l_out-1")):
            own = own[-1:] * np.float32(self._logits if name == "result_output" else 1)
        raw = STORED[self._dtype](own)
        address = self._buffers.setdefault(word, HEAP * (1 + len(self._buffers)))
        words = np.frombuffer(raw + bytes(-len(raw) % 4), "<u4")
        self._log.add_stop([Span(address, words)])
        return x


def logged(
    folder: Path, dtype: str = "f32", maths=ops, halves: bool = False, tokens=TOKENS, **more: object
) -> tuple[Model, Search]:
    """A model, and what an engine wrote when it ran tokens."""
    engine = Engine(write_model(folder / "m.gguf"), maths=maths)
    writer = LogWriter(folder)
    step = engine.step(list(tokens), tap=Writes(writer, dtype, halves * engine.config.head_k, **more))
    program, x = Model(folder / "m.gguf"), None
    program.engine = engine
    for part in program.parts(tokens):
        x = part.run(x, step)
    writer.close()
    return Model(folder / "m.gguf"), Search(Memory(Log(folder)))


@pytest.mark.parametrize(
    ("dtype", "halves"), [("f32", False), ("f64", False), ("f16", False), ("bf16", False), ("f32", True)]
)
def test_every_row_of_a_right_engine_is_found(dtype, halves, tmp_path):
    model, search = logged(tmp_path, dtype, halves=halves)
    rows = align(model, search, TOKENS).rows
    assert {name for name, each in rows.items() if len(each.places) < len(TOKENS)} == set()
    assert search.dtypes[0] == dtype
    limit = {"f16": 1e-6, "bf16": 1e-4}.get(dtype, 1e-11)
    assert max(found.nmse for each in rows.values() for found in each.places.values()) < limit


@pytest.mark.parametrize(
    ("wrong", "places"),
    [
        ({"swiglu": lambda gate, up: ops.gelu(gate) * up}, {"ffn_swiglu"}),
        ({"rope_pairs": lambda x, cos, sin: ops.rope_pairs(x, cos, -sin)}, {"Qcur_rope", "Kcur_rope"}),
        ({"attention_values": lambda probs, v: ops.attention_values(probs, v[:, :, ::-1])}, {"kqv_out"}),
    ],
)
def test_values_that_are_wrong_are_found_by_what_follows_from_them(wrong, places, tmp_path):
    model, search = logged(tmp_path, maths=SimpleNamespace(**{**vars(ops), **wrong}))
    rows = align(model, search, TOKENS).rows
    off = {name.partition("-")[0] for name, each in rows.items() if any(f.nmse > 1e-9 for f in each.places.values())}
    assert off == places
    everywhere, last = {*range(len(TOKENS))}, {len(TOKENS) - 1}  # behind the last attention the last token's row counts
    for name, each in rows.items():
        assert each.places.keys() >= (everywhere if name.endswith("-0") else last), name


PROJECTED = ("Qcur_proj", "Kcur_proj")
TURNED_BACK = {"rope_pairs": lambda x, cos, sin: ops.rope_pairs(x, cos, -sin)}


@pytest.mark.parametrize(
    ("wrong", "nowhere", "places"),
    [
        ({}, PROJECTED, set()),
        (TURNED_BACK, PROJECTED, {"Qcur_rope", "Kcur_rope"}),
        # the norm is not known where nothing that is made of it is there
        (TURNED_BACK, (*PROJECTED, "Vcur_proj", "attn_norm"), None),
        # nor, where the first token is off too, whether the projections are right
        ({"rope_pairs": lambda x, cos, sin: ops.rope_pairs(1.1 * x, cos, sin)}, PROJECTED, None),
        # what is there, and wrong, is not taken for what is stored nowhere: attention is not accused of its inputs
        (TURNED_BACK, ("Qcur_rope", "Kcur_rope"), None),
    ],
)
def test_what_is_stored_nowhere_is_looked_through_if_it_is_known_to_be_right(wrong, nowhere, places, tmp_path):
    some = TOKENS[:3]
    model, search = logged(tmp_path, maths=SimpleNamespace(**{**vars(ops), **wrong}), tokens=some, nowhere=nowhere)
    found = align(model, search, some)
    off = {n.partition("-")[0] for n, each in found.rows.items() if any(f.nmse > 1e-9 for f in each.places.values())}
    assert off == (places or set())
    assert found.is_wrong == bool(places)
    assert (places is None) <= (found.nowhere is not None)
    assert (places == set()) <= (found.nowhere is None)


@pytest.mark.parametrize(("logits", "nowhere"), [(1.0, None), (0.5, ("result_output", 5))])
def test_a_program_that_needs_the_last_token_alone_in_the_end_is_not_accused(logits, nowhere, tmp_path):
    """Of logits that nothing follows from nothing is taken by its place."""
    model, search = logged(tmp_path, last_only=True, logits=logits)
    found = align(model, search, TOKENS)
    assert found.nowhere == nowhere
    assert max(each.nmse for rows in found.rows.values() for each in rows.places.values()) < 1e-11


def test_a_program_that_took_other_ids_is_told_by_what_it_makes_of_their_embeddings(tmp_path):
    taken = (1, 17, 6, 80, 42, 9)
    model, search = logged(tmp_path, tokens=taken)
    found = align(model, search, TOKENS)
    assert (found.nowhere, list(found.ids)) == (("embd", 2), list(taken))
    assert max(each.nmse for rows in found.rows.values() for each in rows.places.values()) < 1e-11


def test_what_was_never_written_is_nowhere(tmp_path):
    _, search = logged(tmp_path)
    row = np.random.default_rng(0).standard_normal(64)
    assert search.find(row) is None
    assert search.find(np.zeros(64)) is None
    assert {*search.dtypes} == {*DTYPES}
