"""A model file's weights: listed, decoded twice, looked at; and against another file, tensor by tensor."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
from command import run
from gguf import GGMLQuantizationType as Type
from llamaref import Weights
from models.gguf_file import read_gguf, write_gguf
from models.options import OPTIONS
from models.small import VOCAB, write_model
from models.split import split_model

from llamadiff import UserError
from llamadiff.ext.file import alone
from llamadiff.ext.file.alone import inspect
from llamadiff.ext.file.opening import judge_weights
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.dequantize import Dequantizer

UP, NORM, Q = "blk.1.ffn_up.weight", "blk.1.ffn_norm.weight", "blk.0.attn_q.weight"
SHAPE = (512, 256)
NAN = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)  # as a scale


def values(seed: int = 5) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(SHAPE) / 16).astype(np.float32)


def written(path: Path, array: np.ndarray, kind: str = "F16", name: str = UP, **options: object) -> Path:
    return write_model(path, kind=kind, tensors={name: array}, **options)


def found(path: Path, where: str) -> list[str]:
    """What is said of a tensor of a file by itself."""
    return [oddity.says for oddity in inspect(path, load=False).oddities if oddity.where == where]


# -- alone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_what_a_tensor_holds(size, tmp_path):
    array = values() * np.float32(size)
    array[:, ::4] = 0
    row = next(row for row in inspect(written(tmp_path / "m.gguf", array, "F32"), load=False).rows if row.name == UP)
    assert (row.type, row.shape, row.n_bytes, row.decoders) == ("F32", SHAPE, array.nbytes, "plain numbers")
    assert row.stats.rms == pytest.approx(np.sqrt((array.astype(float) ** 2).mean()), rel=1e-5, abs=0)
    assert row.stats.mean == pytest.approx(array.mean(dtype=float), abs=1e-6 * size)
    assert (row.stats.min, row.stats.max) == (array.min(), array.max())
    assert (row.stats.zeros, row.stats.nan, row.stats.inf) == (0.25, 0, 0)


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"llama-biased"}))
def test_right_models_have_no_finding(name, small_model):
    report = inspect(small_model(name, "Q8_0"))
    assert report.findings == ()
    assert report.verdict == "match"
    assert {row.decoders for row in report.rows} <= {"bit-equal", "plain numbers"}


def changed(**changes: object) -> np.ndarray:
    """Values, of which some rows are others."""
    array = values()
    for rows, value in changes.values():
        array[rows] = value
    return array


ODD = {
    "all zero": (0 * values(), "all values are zero", True),
    "zero rows": (changed(a=(slice(3, 6), 0)), "rows 3 to 5 (3 of 512) are all zero", False),
    "a constant row": (changed(a=(7, 0.25)), "row 7 is constant", False),
    "equal rows": (changed(a=(40, values()[3])), "row 40 equals row 3", False),
    "a mean far from zero": (values() + 0.5, "the mean 0.5 is far from zero for a spread of 0.0625", False),
    "NaN": (changed(a=((9, 4), np.nan)), "1 NaN, first in row 9", True),
    "Inf": (changed(a=((9, 4), np.inf), b=((11, 4), -np.inf)), "2 Inf, first in row 9", True),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_is_said(name, tmp_path):
    array, says, certain = ODD[name]
    path = written(tmp_path / "m.gguf", array)
    report = inspect(path, load=False)
    assert (UP, says, certain) in [(oddity.where, oddity.says, oddity.certain) for oddity in report.oddities]
    assert report.verdict == ("wrong" if certain else "match")


def test_a_norm_may_be_a_matrix_around_one(tmp_path):
    name = "blk.0.ssm_norm.weight"
    said = found(written(tmp_path / "m.gguf", values() + 1, name=name), name)
    assert not any("far from zero" in each for each in said)


def test_a_tensor_whose_size_is_out_of_line(tmp_path):
    path = written(tmp_path / "m.gguf", 100 * values(), name="blk.3.ffn_up.weight", layers=6)
    assert any("times larger than in the other layers" in says for says in found(path, "blk.3.ffn_up.weight"))
    assert found(path, "blk.2.ffn_up.weight") == []


def blocks(kind: str = "Q8_0") -> np.ndarray:
    return gguf.quants.quantize(values(), Type[kind])


def test_scales_that_are_no_numbers(tmp_path):
    data = blocks()
    data[5, 34:36] = NAN
    data[6, 0:2] = np.frombuffer(np.float16(3e-7).tobytes(), np.uint8)
    said = found(write_model(tmp_path / "m.gguf", kind="Q8_0", tensors={UP: (data, Type.Q8_0)}), UP)
    assert "the scale of row 5, block 1 is NaN" in said
    assert "the scale of row 6, block 0 is subnormal: float16 keeps at most 4 bits of it" in said


@pytest.mark.parametrize(("change", "differs"), [
    (lambda out: out + 1, True), (lambda out: np.where(np.isnan(out), -out, out), False),
])  # fmt: skip
def test_decoders_that_differ_are_a_finding(change, differs, tmp_path, monkeypatch):
    """But for the bits of what is no number."""
    right, data = Dequantizer.of_type, blocks()
    data[5, 34:36] = NAN

    def off(self, kind):
        decode = right(self, kind)
        return (lambda rows: change(decode(rows))) if kind == "Q8_0" else decode

    monkeypatch.setattr(Dequantizer, "of_type", off)
    report = inspect(write_model(tmp_path / "m.gguf", kind="Q8_0", tensors={UP: (data, Type.Q8_0)}), load=False)
    assert differs == any("gguf-py and ggml decode" in oddity.says and "of Q8_0 otherwise" in oddity.says
                          for oddity in report.findings)  # fmt: skip


def test_a_type_that_one_decoder_knows_is_said(small_model, monkeypatch):
    monkeypatch.setattr(Dequantizer, "of_type", lambda self, kind: None)
    report = inspect(small_model("llama", "Q8_0"), load=False)
    assert (
        "Q8_0 is decoded by gguf-py alone: ggml has none for it, so that nothing confirms the values"
        in report.unchecked
    )
    assert report.verdict == "match"


def test_a_type_that_none_knows_is_unchecked(tmp_path):
    data = np.zeros((512, 292), np.uint8)
    path = write_model(tmp_path / "m.gguf", tensors={UP: (data, Type.Q8_K)})
    report = inspect(path, load=False)
    assert any(f"{UP} is of type Q8_K, which neither gguf-py nor ggml decodes" in said for said in report.unchecked)
    assert report.verdict == "unchecked"


def test_a_type_that_gguf_py_has_not_heard_of(tmp_path):
    path = written(tmp_path / "m.gguf", values())
    data = bytearray(path.read_bytes())
    at = data.index(UP.encode()) + len(UP) + 4 + 16
    assert int.from_bytes(data[at : at + 4], "little") == Type.F16
    data[at : at + 4] = (42).to_bytes(4, "little")
    path.write_bytes(data)
    done = run("weights", path)
    assert done.returncode == 2
    assert f"{UP} is of type 42, which gguf-py" in done.stderr


def test_rules_of_the_architecture(tmp_path):
    path = write_model(tmp_path / "m.gguf", layers=3, tensors={"blk.1.nonsense.weight": values()})
    report = inspect(path, load=False)
    assert [(o.where, o.certain) for o in report.oddities] == [("blk.1.nonsense.weight", False)]
    shapes = write_model(tmp_path / "s.gguf", tensors={"blk.0.attn_k.weight": values()[:64]})
    assert any(
        "shape [64, 256]; the metadata implies [128, 256]" in says for says in found(shapes, "blk.0.attn_k.weight")
    )


def test_a_missing_tensor_is_named(tmp_path):
    fields, tensors = read_gguf(write_model(tmp_path / "m.gguf", layers=4))
    del tensors["blk.2.ffn_up.weight"]
    done = run("weights", write_gguf(tmp_path / "less.gguf", fields, tensors))
    assert done.returncode == 1
    assert "blk.2.ffn_up.weight: is missing: 3 other layers have it" in done.stdout


def test_what_llama_cpp_refuses_is_a_finding(tmp_path):
    """One that only llama.cpp's own rules find: a norm that every layer lacks."""
    path = write_model(tmp_path / "m.gguf", drop=("ffn_norm",))
    report = inspect(path)
    assert "tensor 'blk.0.ffn_norm.weight' not found" in report.findings[0].says


def test_a_tensor_that_llama_cpp_does_not_read_is_a_finding(tmp_path):
    """It wants no output.bias of this architecture, and refuses what it does not know."""
    bias = {"output.bias": np.zeros(VOCAB, np.float32)}
    report = inspect(write_model(tmp_path / "m.gguf", bias=True, tensors=bias))
    assert [oddity.where for oddity in report.findings] == ["llama.cpp"]
    assert "wrong number of tensors" in report.findings[0].says


def test_without_llama_cpp_nothing_is_laid_to_it(small_model, monkeypatch):
    def absent(self, request, progress):
        from llamadiff.system.errors import UnrunnableError

        raise UnrunnableError("llama-cpp-python is not installed")

    monkeypatch.setattr(Child, "ask", absent)
    assert inspect(small_model()).findings == ()


def test_what_is_assumed_is_said(small_model):
    notes = inspect(small_model(), load=False).notes
    assert "llama.rope.freq_base is not in the file: llama.cpp assumes 10000" in notes
    assert "the file has no tokenizer" in notes
    tied = inspect(small_model("gemma"), load=False).notes
    assert any("llama.cpp multiplies by token_embd.weight (a tied head)" in note for note in tied)


def test_all_formats(small_model, tmp_path):
    path = small_model("llama", "Q8_0")
    places = [tmp_path / name for name in ("r.json", "r.csv", "r.md")]
    done = run("weights", path, "-o", f"json:{places[0]}", "-o", f"csv:{places[1]}", "-o", f"markdown:{places[2]}")
    assert done.returncode == 0
    data = json.loads(places[0].read_text("utf-8"))
    names = list(Weights(path))
    assert (data["schema"], data["verdict"]) == ("llamadiff.weights/1", "match")
    assert [row["name"] for row in data["tensors"]] == names
    table = list(csv.DictReader(io.StringIO(places[1].read_text("utf-8"))))
    assert [row["tensor"] for row in table] == names
    assert table[-1]["decoders"] == "bit-equal"
    for name in names:
        assert name in places[2].read_text("utf-8")
        assert name in done.stdout
    assert run("weights", path, "-o", "csv:-").stdout == places[1].read_text("utf-8")


def test_nothing_given_is_overwritten(small_model, tmp_path):
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    shutil.copy(small_model(), a), shutil.copy(small_model(), b)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}", encoding="utf-8")
    c = tmp_path / "c"
    for *words, file in ((a, f"json:{a}"), (a, b, f"csv:{b}"), (a, c, f"markdown:{c / 'config.json'}")):
        done = run("weights", *words, "-o", file)
        assert (done.returncode, done.stdout) == (2, "")
    assert (tmp_path / "c" / "config.json").read_text("utf-8") == "{}"


# -- split --------------------------------------------------------------------------------------------------------


def test_split_files_are_one_model(tmp_path, small_model):
    first, whole = split_model(tmp_path), small_model("llama", "Q8_0")
    assert {row.name for row in inspect(first).rows} == set(Weights(whole))
    for a, b in ((first, whole), (whole, first)):
        report = judge_weights(a, b)
        assert (report.verdict, report.oddities) == ("match", ())
    done = run("weights", first)
    assert done.returncode == 0
    Path(str(first).replace("00001", "00002", 1)).unlink()
    for words in ((first,), (whole, first)):
        done = run("weights", *words)
        assert done.returncode == 2
        assert "1 of its 3 parts are not beside it, the first is m-00002-of-00003.gguf" in done.stderr


# -- against another file -----------------------------------------------------------------------------------------


PAIRS = [*((kind, "F32") for kind in ("F16", "BF16", "Q8_0", "Q5_0", "Q4_0")), ("Q8_0", "Q4_0"), ("Q4_0", "Q5_0")]


@pytest.mark.parametrize(("kind", "other"), PAIRS)
def test_honest_quantization_is_noise(kind, other, small_model):
    report = judge_weights(small_model("llama", kind), small_model("llama", other))
    back = judge_weights(small_model("llama", other), small_model("llama", kind))
    for each in (report, back):
        assert (each.verdict, each.oddities) == ("noise", ())
    row = next(row for row in report.rows if row.name == UP)
    assert other != "F32" or 0.8 < row.distance.nmse / row.cost < 1.2


def rolled(array: np.ndarray) -> np.ndarray:
    return np.roll(array.reshape(-1), 1).reshape(array.shape)


def at(rows: object, change: object) -> object:
    """A change of some rows or blocks alone."""

    def done(array: np.ndarray) -> np.ndarray:
        array[rows] = change(array[rows])
        return array

    return done


CORRUPTED = {
    "rows zero": (at(slice(8, 12), lambda x: 0 * x), "rows 8 to 11: all values are zero"),
    "one row zero": (at(slice(70, 71), lambda x: 0 * x), "row 70: all values are zero"),
    "a block zero": (at((3, slice(64, 96)), lambda x: 0 * x), "row 3, block 2 of each row's 8 blocks of 32: all"),
    "half of each block": (at((slice(5), slice(16, 32)), lambda x: 0 * x), "rows 0 to 4, block 0 of each row's 8"),
    "sign of rows": (at(slice(3), lambda x: -x), "rows 0 to 2: every value is multiplied by -"),
    "scale of a block": (at((9, slice(32)), lambda x: 2 * x), "row 9, block 0 of each row's 8 blocks of 32: every"),
    "rows swapped": (lambda x: x[[*range(5), 9, 6, 7, 8, 5, *range(10, 512)]], "2 rows (5, 9): these two rows are"),
    "a row of another": (at(slice(20, 21), lambda x: values()[300:301]), "row 20: row 20 holds row 300"),
    "everything shifted": (rolled, "all values are 1 place later"),
    "noise in a column of blocks": (at((slice(None), slice(32, 64)), lambda x: x + 0.8 * values(8)[:, :32]),
                                    "block 1 of each row's 8 blocks of 32"),
    "one sub-block": (at((3, slice(72, 80)), lambda x: x + values(8)[0, :8] + 0.2),
                      "row 3, block 2 of each row's 8 blocks of 32; of each, values 8 to 15"),
    "scaled": (lambda x: x / 8, "every value is multiplied by 0.12"),
    "transposed": (lambda x: np.ascontiguousarray(x.T).reshape(x.shape), "is transposed"),
    "negated": (lambda x: -x, "every value has the other sign"),
    "another tensor": (lambda x: values(9), "these are the values of blk.0.ffn_up.weight"),
    "rows in reverse": (lambda x: x[::-1], "the rows are in reverse order"),
    "any order of rows": (lambda x: x[np.random.default_rng(1).permutation(512)], "the rows are in another order"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    tensors = {UP: values(), "blk.0.ffn_up.weight": values(9)}
    return write_model(tmp_path_factory.mktemp("sound") / "m.gguf", kind="F16", tensors=tensors)


def test_the_smaller_file_comes_first(small_model):
    small, good = small_model(kind="Q4_0"), small_model(kind="F16")
    (note,) = [note for note in judge_weights(good, small).notes if "smaller" in note]
    assert note.startswith(f"{small.name} is the smaller file: ")
    assert note.endswith(f"llamadiff weights {small} {good}")
    assert not any("smaller" in note for note in judge_weights(small, good).notes)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", CORRUPTED)
def test_a_corrupted_tensor_is_named_with_its_place(name, kind, sound, tmp_path):
    change, words = CORRUPTED[name]
    tensors = {UP: np.ascontiguousarray(change(values())), "blk.0.ffn_up.weight": values(9)}
    report = judge_weights(write_model(tmp_path / "m.gguf", kind=kind, tensors=tensors), sound)
    assert [oddity.where for oddity in report.findings] == [UP]
    assert words in report.findings[0].says
    assert next(row for row in report.rows if row.name == UP).verdict == "wrong"


def test_a_nan_is_told(sound, tmp_path):
    array = values()
    array[100, 7] = np.nan
    tensors = {UP: array, "blk.0.ffn_up.weight": values(9)}
    report = judge_weights(write_model(tmp_path / "m.gguf", kind="F16", tensors=tensors), sound)
    assert "1 values are not finite, row 100" in report.summary


def test_tensors_and_keys_of_one_side_are_findings(tmp_path):
    bias = {"blk.0.attn_q.bias": values()[0]}
    a = write_model(tmp_path / "a.gguf", tensors=bias, extra={"rope.freq_base": 5e5})
    b = write_model(tmp_path / "b.gguf", extra={"rope.freq_base": 1e4})
    found = {oddity.where: oddity.says for oddity in judge_weights(a, b).findings}
    assert found == {"blk.0.attn_q.bias": "is missing in b.gguf", "llama.rope.freq_base": "is 500000, in b.gguf 10000"}
    found = {oddity.where: oddity.says for oddity in judge_weights(b, a).findings}
    assert found["blk.0.attn_q.bias"] == "is missing"
    done = run("weights", a, b)
    assert done.returncode == 1
    assert "blk.0.attn_q.bias" in done.stdout


def test_files_of_different_models_are_refused(small_model):
    with pytest.raises(UserError, match=r"holds qwen2, llama\.F16\.gguf holds llama; give two files of one model"):
        judge_weights(small_model("llama"), small_model("qwen2"))
    with pytest.raises(UserError, match=r"block_count = 6, llama\.F16\.gguf has 2"):
        judge_weights(small_model("llama"), small_model("llama-deep"))
    done = run("weights", small_model("llama"), small_model("qwen2"))
    assert (done.returncode, done.stdout) == (2, "")


def test_a_head_that_is_the_embedding_once_more_may_be_left_out(tmp_path):
    table = values()[:96]
    a = write_model(tmp_path / "a.gguf", tensors={"token_embd.weight": table}, tied=True)
    b = write_model(tmp_path / "b.gguf", tensors={"token_embd.weight": table, "output.weight": table}, tied=True)
    assert judge_weights(a, b).findings == ()


def test_what_cannot_be_decoded_and_differs_is_unchecked(tmp_path):
    data = np.zeros((512, 292), np.uint8)
    a = write_model(tmp_path / "a.gguf", tensors={UP: (data, Type.Q8_K)})
    report = judge_weights(a, write_model(tmp_path / "b.gguf", tensors={UP: (data + 1, Type.Q8_K)}))
    assert report.verdict == "unchecked"
    assert f"{UP}: Q8_K is decoded by neither gguf-py nor ggml, and the bytes differ" in report.unchecked
    done = run("weights", a, tmp_path / "b.gguf")
    assert done.returncode == 2


def test_llama_cpp_is_asked_once_a_file(small_model):
    with mock.patch.object(alone, "refusal", return_value=None) as asked:
        inspect(small_model())
    assert asked.call_count == 1
