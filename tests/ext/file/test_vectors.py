"""Test blocks of every type, and layout errors of an engine that decodes them: each is named from one tensor."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import misread
import numpy as np
import pytest
from command import run
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from llamaref import Weights
from safetensors.numpy import save_file

from llamadiff import UserError
from llamadiff.ext.file.blocks.fields import FIELDS, PACKED
from llamadiff.ext.file.blocks.orders import bits_of, six_bit_scales
from llamadiff.ext.file.misread import misreading
from llamadiff.ext.file.opening import judge_weights
from llamadiff.ext.file.vectors import FILE, vector_blocks, write_vectors
from llamadiff.llamacpp.dequantize import Dequantizer

BLOCKS = [kind for kind in FIELDS if kind not in ("F16", "BF16")]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("v") / "vectors"
    assert write_vectors(folder) == len(FIELDS)
    return folder


@pytest.fixture(scope="module")
def weights(vectors) -> Weights:
    return Weights(vectors / FILE)


def right(kind: str, rows: np.ndarray | None = None) -> np.ndarray:
    """The right answer, by gguf-py; of Q1_0, which it does not decode, from the format: a scale, then signs."""
    rows = vector_blocks(kind) if rows is None else rows
    with np.errstate(all="ignore"):
        if kind == "Q1_0":
            blocks = rows.reshape(len(rows), -1, 18)
            signs = 2.0 * np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little") - 1
            return (signs * np.ascontiguousarray(blocks[..., :2]).view(np.float16)).reshape(len(rows), -1).astype("f4")
        data = rows.view(np.float16) if kind == "F16" else rows
        return np.asarray(dequantize(data, Type[kind]), np.float32)


def test_every_type_that_ggml_or_gguf_py_decodes_has_a_vector():
    known = {kind.name for kind in Type} - {"F32", "F64", "I8", "I16", "I32", "I64"}
    undecoded = {"Q8_1", "Q8_K"}  # neither decodes them: they are what activations are rounded to
    assert known - undecoded == set(FIELDS)


@pytest.mark.parametrize("kind", FIELDS)
def test_fields_cover_every_byte_once(kind):
    places = sorted(FIELDS[kind].values())
    assert [first for first, _ in places] == [0, *(last for _, last in places[:-1])]
    assert places[-1][1] == gguf.GGML_QUANT_SIZES[Type[kind]][1]


@pytest.mark.parametrize("kind", FIELDS)
def test_answers_are_gguf_pys_and_ggmls(kind, vectors, weights):
    answer = np.load(vectors / f"{kind}.npy")
    assert np.array_equal(answer, right(kind))
    by_ggml = Dequantizer(weights).of_type(kind)(weights.read_raw(kind))
    assert np.array_equal(answer.view(np.uint32), by_ggml.view(np.uint32))
    assert np.isfinite(answer).all()
    assert (vectors / f"{kind}.bin").read_bytes() == vector_blocks(kind).tobytes()
    data = json.loads((vectors / f"{kind}.json").read_text("utf-8"))
    assert np.array_equal(np.array(data["values"], np.float32), answer)
    assert bytes.fromhex(data["rows"][3]) == vector_blocks(kind)[3].tobytes()


@pytest.mark.parametrize("kind", FIELDS)
def test_every_bit_is_set_and_not_set_and_matters(kind):
    """Nearly: the highest exponents of a scale would make it infinite."""
    size = gguf.GGML_QUANT_SIZES[Type[kind]][1]
    rows = vector_blocks(kind)
    bits = np.unpackbits(rows.reshape(-1, size), axis=1)
    assert (bits.any(axis=0) & ~bits.all(axis=0)).mean() >= 0.97
    answer = right(kind)
    blocks = rows[:8].reshape(8, -1, size)
    idle = {7, 15, 23, 31} if kind == "NVFP4" else set()  # the signs of its scales, which have none
    for bit in set(range(8 * size)) - idle:
        flipped = blocks.copy()
        flipped[..., bit // 8] ^= 1 << (bit % 8)
        assert not np.array_equal(right(kind, flipped.reshape(8, -1)), answer[:8]), bit


def test_a_right_engine_is_right(vectors, tmp_path):
    for kind in FIELDS:
        np.save(tmp_path / f"{kind}.npy", np.load(vectors / f"{kind}.npy"))
    done = run("weights", vectors / FILE, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "all 26 tensors are equal" in done.stdout


OWN = [
    (cause, mistake, kind)
    for cause, mistakes in misread.MISTAKES.items() if cause != "tensor-offset-wrong"
    for mistake, kinds in mistakes.items() for kind in kinds
]  # fmt: skip


@pytest.mark.parametrize(("cause", "mistake", "kind"), OWN)
def test_a_misread_layout_is_named(cause, mistake, kind, weights):
    told = misreading(weights, kind, misread.decode(kind, vector_blocks(kind), mistake))
    assert told is not None
    assert told.cause == cause
    assert kind in told.says


@pytest.mark.parametrize(("kind", "mistake", "says", "fix"), [
    ("MXFP4", "nibbles are neighbours", "an MXFP4 byte's two nibbles for neighbours", "values j and j + 16 of 32"),
    ("Q4_K", "nibbles 128 apart", "for values 128 apart; they are 32 apart", "values j and j + 32 of 64"),
    ("Q5_K", "quants in the order of bytes", "for neighbours, and the bits of a byte of qh too", "value 32 * i + j"),
    ("Q6_K", "nibbles are neighbours", "for neighbours, but not their high bits", "values j and j + 64 of 128"),
    ("Q3_K", "fields 64 apart", "64 apart; they are 32 apart, but not", "values j, j + 32, j + 64 and j + 96 of 128"),
    ("Q4_K", "scales in a row", "takes six-bit scales, then minima, one after the other (Q4_K)", "get_scale_min_k4"),
    ("Q5_K", "scales and minima in turn", "scale and minimum of each sub-block one after the other", "bytes 8 to 11"),
    ("Q3_K", "scales in a row from the highest bit", "one after the other, the highest bit of a byte first", "high"),
    ("Q3_K", "high bits in the order of bytes", "high bits of one byte for those of neighbours", "bit i of byte j"),
])  # fmt: skip
def test_an_order_is_told_in_words_that_say_what_to_do(kind, mistake, says, fix, weights):
    told = misreading(weights, kind, misread.decode(kind, vector_blocks(kind), mistake))
    assert told is not None
    assert says in told.says
    assert fix in told.fix


def blocks_of(kind: str) -> np.ndarray:
    return vector_blocks(kind).reshape(-1, gguf.GGML_QUANT_SIZES[Type[kind]][1])


def answered(kind: str, blocks: np.ndarray) -> np.ndarray:
    return right(kind, np.ascontiguousarray(blocks))


def spoiled(kind: str, name: str, change: object) -> np.ndarray:
    """Blocks decoded with other bytes in a field."""
    blocks, (first, last) = blocks_of(kind).copy(), FIELDS[kind][name]
    blocks[:, first:last] = change(blocks[:, first:last])
    return answered(kind, blocks)


def touched(kind: str, bits: np.ndarray) -> list[int]:
    """The values of a block that some of its bits change."""
    blocks = blocks_of(kind)[:64].copy()
    before = answered(kind, blocks)
    for bit in bits:
        blocks[:, bit // 8] ^= np.uint8(1 << bit % 8)
    return np.flatnonzero((answered(kind, blocks) != before).any(axis=0)).tolist()


@pytest.mark.parametrize(("kind", "name"), [
    (kind, name) for kind, fields in PACKED.items() for name in fields if name in ("qs", "qh")
])  # fmt: skip
def test_the_bits_of_a_quant_are_those_of_one_value(kind, name):
    bits = bits_of(kind, name)
    first, last = FIELDS[kind][name]
    assert sorted(bits.ravel()) == [*range(8 * first, 8 * last)]
    assert all(touched(kind, own) == [value] for value, own in enumerate(bits))


@pytest.mark.parametrize(("kind", "minima", "size"), [
    ("Q2_K", 16, 16), ("Q3_K", 0, 16), ("Q4_K", 8, 32), ("Q5_K", 8, 32), ("IQ4_XS", 0, 32),
])  # fmt: skip
def test_the_bits_of_a_scale_are_those_of_one_sub_block(kind, minima, size):
    """Of one scale, and behind the scales those of one minimum."""
    bits = bits_of(kind, "scales") if kind == "Q2_K" else six_bit_scales(kind)
    count = len(bits) - minima
    assert len(set(bits.ravel())) == bits.size
    for number, own in enumerate(bits):
        assert {value // size for value in touched(kind, own)} == {number % count}
    blocks = blocks_of(kind)[:1].copy()
    blocks[:, [*{bit // 8 for bit in bits.ravel()}]] = 0  # the lowest bit of a number is one, the next is two
    steps = []
    for bit in bits[0][:3]:
        stepped = blocks.copy()
        stepped[:, bit // 8] |= np.uint8(1 << bit % 8)
        steps.append((answered(kind, stepped) - answered(kind, blocks))[0, :size])
    assert np.allclose(steps[1], 2 * steps[0], rtol=1e-5)
    assert np.allclose(steps[2], 4 * steps[0], rtol=1e-5)


@pytest.mark.parametrize(("kind", "run", "cause"), [
    (kind, run, cause)
    for kind, half in {"Q4_0": 16, "Q4_1": 16, "IQ4_NL": 16, "IQ4_XS": 16, "MXFP4": 16, "NVFP4": 8}.items()
    for run, cause in {1: "nibbles-interleaved", 4: "quants-order", half // 2: "quants-order"}.items()
])  # fmt: skip
def test_nibbles_that_share_a_scale_may_be_taken_in_any_runs(kind, run, cause, weights):
    """Where a byte's values have one scale, what is read is the right values in another order."""
    half = 8 if kind == "NVFP4" else 16
    low, high = np.moveaxis(right(kind).reshape(-1, 2, half // run, run), 1, 0)
    for first, second, end in ((low, high, ""), (high, low, ", the highest bits first")):
        told = misreading(weights, kind, np.stack([first, second], axis=2).reshape(right(kind).shape))
        assert told is not None
        assert told.cause == cause
        assert told.says.endswith(f"neighbours{end}" if run == 1 else f"{run} apart{end}; they are {half} apart")


def has(name: str) -> list[str]:
    return [kind for kind in BLOCKS if name in FIELDS[kind]]


def swapped(q: np.ndarray) -> np.ndarray:
    return q << 4 | q >> 4


def of_step(kind: str, step: int) -> np.ndarray:
    """Blocks taken from every ``step`` bytes, as many as there are."""
    data, size = blocks_of(kind).reshape(-1), gguf.GGML_QUANT_SIZES[Type[kind]][1]
    count = (len(data) - size) // step + 1
    found = np.zeros((len(blocks_of(kind)), size), np.uint8)
    for i in range(min(count, len(found))):
        found[i] = data[i * step : i * step + size]
    return answered(kind, found)


def part_zero(kind: str) -> np.ndarray:
    """Only the first quarter of every block is written."""
    size = gguf.GGML_QUANT_SIZES[Type[kind]][0]
    values = right(kind).reshape(-1, size).copy()
    values[:, size // 4 :] = 0
    return values


# layout error -> the types that can have it, what an engine then gives, words that must be in what is said
ERRORS = {
    "nibble order": (has("qs"), lambda k: spoiled(k, "qs", swapped), "nibbles"),
    "high nibble for both": (has("qs"), lambda k: spoiled(k, "qs", lambda qs: (qs >> 4) * 17), "nibble"),
    "high bits ignored": (has("qh"), lambda k: spoiled(k, "qh", np.zeros_like), "high bits"),
    "high bits from the wrong byte": (has("qh"), lambda k: spoiled(k, "qh", lambda q: np.roll(q, len(q[0]) // 2, 1)),
                                      "high bits"),
    "signs ignored": (has("signs"), lambda k: spoiled(k, "signs", np.zeros_like), "sign"),
    "scales' nibbles": (has("scales"), lambda k: spoiled(k, "scales", swapped), "scale"),
    "scale's byte order": (has("d"), lambda k: spoiled(k, "d", lambda d: d[:, ::-1]), "scale"),
    "sign of all": (BLOCKS, lambda k: -right(k), "sign"),
    "a quarter not written": (BLOCKS, part_zero, "zero"),
    "stride": (BLOCKS, lambda k: of_step(k, gguf.GGML_QUANT_SIZES[Type[k]][1] + 2), ""),
    "next block's scale": (has("d"), lambda k: spoiled(k, "d", lambda d: np.roll(d, -1, 0)), ""),
}  # fmt: skip


CASES = [(error, kind) for error, (kinds, _, _) in ERRORS.items() for kind in kinds]


@pytest.mark.parametrize(("error", "kind"), CASES)
def test_a_layout_error_of_any_type_is_named(error, kind, weights):
    _, change, words = ERRORS[error]
    told = misreading(weights, kind, change(kind))
    assert told is not None
    assert words in told.says
    assert kind in told.says


@pytest.mark.parametrize(("kind", "other"), [("Q4_0", "IQ4_NL"), ("Q3_K", "IQ3_S"), ("F16", "BF16"), ("Q5_0", "Q5_1"),
                                             ("Q4_0", "Q4_1"), ("IQ2_XXS", "TQ2_0"), ("Q4_K", "Q5_K")])  # fmt: skip
def test_a_neighbouring_type_is_named(kind, other, weights):
    if "16" in kind:
        values = (vector_blocks(kind).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        data, size = vector_blocks(kind).reshape(-1), gguf.GGML_QUANT_SIZES[Type[other]][1]
        count = len(blocks_of(kind))
        data = np.concatenate([data, np.zeros(max(0, count * size - len(data)), np.uint8)])
        values = right(other, data[: count * size].reshape(count, size))
    told = misreading(weights, kind, values)
    assert told is not None
    assert told.says == f"reads {kind} as {other}"


@pytest.mark.parametrize("kind", FIELDS)
def test_right_values_and_noise_have_no_name(kind, weights):
    noise = np.random.default_rng(1).standard_normal(right(kind).size).astype(np.float32)
    assert misreading(weights, kind, noise) is None


def test_a_strangers_file_is_judged(vectors, tmp_path):
    answers = {kind: right(kind) for kind in ("Q4_0", "Q8_0", "Q6_K")}
    answers["Q4_0"] = spoiled("Q4_0", "qs", swapped).reshape(16, -1)
    answers["Q6_K"] = np.roll(answers["Q6_K"].reshape(-1), 1).reshape(16, -1)
    save_file(answers, tmp_path / "mine.safetensors")
    done = run("weights", vectors / FILE, tmp_path)
    assert done.returncode == 1
    assert "Q4_0: swaps the high and low nibbles of Q4_0" in done.stdout
    assert "Q6_K: all values are 1 place later" in done.stdout
    report = judge_weights(vectors / FILE, tmp_path)
    assert [oddity.where for oddity in report.findings] == ["Q4_0", "Q6_K"]
    assert any("23 of the file's 26 tensors are not in" in note for note in report.notes)


def test_sixteen_bit_answers_are_right(vectors, tmp_path):
    for kind in ("Q8_0", "MXFP4"):
        np.save(tmp_path / f"{kind}.npy", right(kind).astype(np.float16))
    assert judge_weights(vectors / FILE, tmp_path).findings == ()


def test_wrong_sizes_are_told(vectors, tmp_path):
    np.save(tmp_path / "Q8_0.npy", right("Q8_0")[:4])
    report = judge_weights(vectors / FILE, tmp_path)
    assert "Q8_0: 4096 values where the file has 16384" in report.summary


def test_what_is_no_dump_is_refused(vectors, tmp_path):
    np.save(tmp_path / "logits.npy", np.zeros(3, np.float32))
    with pytest.raises(UserError, match="no array that is called like a tensor"):
        judge_weights(vectors / FILE, tmp_path)
    (tmp_path / "Q8_0.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(UserError, match="not a plain"):
        judge_weights(vectors / FILE, tmp_path)


def test_nothing_that_is_there_is_overwritten(vectors, tmp_path):
    for place in (vectors, tmp_path / "no" / "where"):
        done = run("weights", "--vectors", place)
        assert (done.returncode, done.stdout) == (2, "")
    (tmp_path / "empty").mkdir()
    done = run("weights", "--vectors", tmp_path / "empty")
    assert (done.returncode, done.stdout) == (0, "")
    assert "26 types in" in done.stderr
