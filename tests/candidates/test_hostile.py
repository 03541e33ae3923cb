"""Foreign numbers, arrays and files that are not what they should be: one line, at once, and little memory."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import sys
import tracemalloc
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from models import small

from llamadiff import UserError
from llamadiff.candidates import name_map
from llamadiff.candidates.map_file import load_map
from llamadiff.candidates.opening import resolve
from llamadiff.candidates.reference import record
from llamadiff.candidates.source import Context
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import USUAL
from llamadiff.trace import taps
from llamadiff.trace.metadata import KEY, SCHEMA
from llamadiff.trace.reader import Trace
from llamadiff.verbs.judging import judge
from llamadiff.verbs.tolerance_file import load_rules

TOKENS = (1, 17, 5)
ROWS = np.ones((3, small.EMBD), np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(small.write_model(tmp_path_factory.mktemp("model") / "m.gguf", layers=1))


def loaded(path: Path, model: Model, mapping: str = "llama.cpp") -> Trace:
    return resolve(str(path), Context(model, TOKENS, len(TOKENS), load_map(mapping)))


@contextmanager
def without_warnings() -> Iterator[None]:
    """A warning would be a line of its own on standard error: here it is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """The calls of functions, Python's and C's."""
    calls = Counter[str]()
    sys.setprofile(lambda _frame, event, _argument: calls.update([event]))
    try:
        yield calls
    finally:
        sys.setprofile(None)


def refused(path: Path, model: Model, mapping: str = "llama.cpp") -> str:
    """The one line with which a candidate is refused; with little memory and work, and without a warning."""
    tracemalloc.start()
    with without_warnings(), pytest.raises(UserError) as caught, counting() as calls:
        loaded(path, model, mapping)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(calls.values()) < 1_000_000
    assert peak < 64 << 20
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert len(line) < 600
    return line


# -- numbers of texts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("-.5", -0.5), ("[2]=7,", 7), ("2 : +1e2", 100), ("NaN", np.nan), ("-Infinity", -np.inf), ("1e400", np.inf),
        ("0.1" + "0" * 300, 0.1), ("9" * 30, 1e30), ("1e-999999999", 0),
    ],
)  # fmt: skip
def test_a_number_is_read(line: str, value: float, model: Model, tmp_path: Path) -> None:
    (tmp_path / "embd.txt").write_text(f"# values\n0\n\n1\n{line}\n", encoding="utf-8")
    with without_warnings():
        trace = loaded(tmp_path, model)
    np.testing.assert_array_equal(trace["embd"][0, :3], np.float32([0, 1, value]))


# -- headers ---------------------------------------------------------------------------------------


def npy(header: bytes | str, data: bytes = b"", version: int = 1) -> bytes:
    """An .npy file of any header."""
    text = header if isinstance(header, bytes) else header.encode("latin-1")
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


def described(shape: str, kind: str = "'<f4'", order: str = "False") -> str:
    return f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


HEADERS = {
    "empty": b"",
    "not numpy": b"\x80\x04\x95hello",
    "cut in its header": npy(described("(3, 256)"))[:20],
    "no data": npy(described("(3, 256)")),
    "too little data": npy(described("(3, 256)"), bytes(3071)),
    "too much data": npy(described("(3, 256)"), bytes(3073)),
    "a huge shape": npy(described("(1000000000000, 256)"), bytes(3072)),
    "a shape beyond 64 bits": npy(described(f"({'9' * 30}, 256)"), bytes(3072)),
    "a shape of 5000 digits": npy(described(f"({'9' * 5000},)"), bytes(3072)),
    "a negative shape": npy(described("(-3, -256)"), bytes(3072)),
    "a shape of fractions": npy(described("(3.0, 256)"), bytes(3072)),
    "a shape of flags": npy(described("(True, 768)"), bytes(3072)),
    "a shape of text": npy(described("'ab'"), bytes(3072)),
    "a number for a shape": npy(described("768"), bytes(3072)),
    "65 axes": npy(described(f"({'1, ' * 64}768)"), bytes(3072)),
    "no axes": npy(described("()"), bytes(4)),
    "objects": npy(described("(3,)", "'|O'"), bytes(24)),
    "text": npy(described("(3,)", "'<U8'"), bytes(96)),
    "flags": npy(described("(3, 256)", "'|b1'"), bytes(768)),
    "complex": npy(described("(3, 256)", "'<c8'"), bytes(6144)),
    "dates": npy(described("(3, 256)", "'<M8[s]'"), bytes(6144)),
    "records": npy(described("(3, 256)", "[('a', '<f4')]"), bytes(3072)),
    "no such type": npy(described("(3, 256)", "'<z4'"), bytes(3072)),
    "a type of lists": npy(described("(3, 256)", "[[[[]]]]"), bytes(3072)),
    "a header of nothing": npy("", bytes(3072)),
    "a header of code": npy("__import__('os').getpid()\n", bytes(3072)),
    "a deep header": npy("(" * 4000, bytes(3072)),
    "an odd escape": npy(described("(3, 256)", r"'\<f4'"), bytes(3072)),
    "a header of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100),
    "version 3": npy(described("(3, 256)"), bytes(3072), 3),
    "version 9": npy(described("(3, 256)"), bytes(3072), 9),
}


def npz(*members: tuple[str, bytes], packed: int = zipfile.ZIP_STORED) -> bytes:
    """An archive, of two members with one name too."""
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", packed) as archive:
        warnings.simplefilter("ignore")
        for member in members:
            archive.writestr(*member)
    return file.getvalue()


def with_bits(flags: int, method: int) -> bytes:
    """An archive with flags and method of the only member set, in both of its headers."""
    data = bytearray(npz(("embd.npy", WHOLE)))
    for start, place in ((0, 6), (data.index(b"PK\x01\x02"), 8)):
        for shift, bits in ((0, flags), (2, method)):
            (old,) = struct.unpack_from("<H", data, start + place + shift)
            struct.pack_into("<H", data, start + place + shift, old | bits)
    return bytes(data)


def with_a_byte_other(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


WHOLE = npy(described("(3, 256)"), np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32).tobytes())
LINES = (
    "1" * 100_000 + "x", "[" + "1" * 100_000, "0." + "1" * 100_000 + "e", " " * 50_000 + "1" + " " * 50_000 + "x",
    "9" * 5000, "[" + "9" * 30 + "] = 1", "\u0663", "[\u0663] = 1", "1_000", "0x10", "[-1] = 2", "1 2", "= 1", "[1] =",
)  # fmt: skip
IDS = ("9" * 5000, "\u0663", "1 2 99999999999", "[" * 100_000, "1.5", "-1", "")
SIDECARS = (
    '{"shape": [1e400, 256]}', '{"shape": [3.0, 256.0]}', '{"shape": ' + "[" * 100_000, "[" * 100_000, "", "5",
    '{"shape": "ab"}', '{"shape": 768}', '{"shape": [true, 768]}', '{"shape": [-3, -256]}', '{"shape": null}',
    '{"shape": [' + "1, " * 64 + "768]}", '{"shape": [' + "9" * 5000 + "]}", '{"shape": [[3], [256]]}',
    '{"shape": [3, 256], "shape": [768]}', '{"shape": [4611686018427387904, 4, 768]}', "\udcff", "x" * 100_000,
)  # fmt: skip
TRACES = ((1 << 40, b"{}"), (8, b"{}"), (1 << 63, b""), (20_000_000, b"[" * 20_000_000), (50_000, b"[" * 50_000))
BITS = ((1, 0), (0, 12), (0, 14), (0, 99))
PACKED = "encrypted, or packed in an unknown way"
# What lies there -> what is said; "no axes" is a header like any other, of another shape.
REFUSED: dict[str, tuple[dict[str, bytes | str], str]] = {
    **{f"line {line[:8]}({len(line)})": ({"embd.txt": f"0.5\n{line}\n"}, "embd.txt:2: ") for line in LINES},
    **{f"ids {text[:8]}": ({"embd.npy": WHOLE, "tokens": text}, "expected token ids") for text in IDS},
    **{f"sidecar {text[:24]}({len(text)})": ({"embd.f32": ROWS.tobytes(), "embd.json": text}, "embd.")
       for text in SIDECARS},
    **{f"npy {name}": ({"embd.npy": data}, "embd has shape []" if name == "no axes" else "embd.npy: ")
       for name, data in HEADERS.items()},
    **{f"npz {name}": ({"t.npz": npz(("embd.npy", data))}, "embd has shape []" if name == "no axes" else "t.npz")
       for name, data in HEADERS.items()},
    **{f"trace {size}": ({"t.safetensors": struct.pack("<Q", size) + data}, "t.safetensors: ")
       for size, data in TRACES},
    **{f"bits {bits}": ({"t.npz": with_bits(*bits)}, PACKED) for bits in BITS},
    "values without end": ({"embd.txt": "0\n" * 1_000_000}, "more than 768 values"),
    "ids without end": ({"result_output@-1.txt": "1\n", "tokens": "1 " * 50_000},
                        "50000 tokens, more than the model's context of 256"),
    "two members of a name": ({"t.npz": npz(("embd.npy", WHOLE), ("embd.npy", WHOLE))}, "two of one name"),
    "a long member": ({"t.npz": npz(("embd.npy", WHOLE + bytes(10_000_000)), packed=zipfile.ZIP_DEFLATED)},
                      "takes 3072 bytes, but there are 10003072"),
    "a damaged member": ({"t.npz": with_a_byte_other(npz(("embd.npy", WHOLE)), 2000)}, "embd: damaged"),
    "a damaged packed member": (
        {"t.npz": with_a_byte_other(npz(("embd.npy", WHOLE), packed=zipfile.ZIP_DEFLATED), 150)}, "embd: damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_file_is_refused(name: str, model: Model, tmp_path: Path) -> None:
    files, words = REFUSED[name]
    for file, content in files.items():
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")
        (tmp_path / file).write_bytes(data)
    assert words in refused(tmp_path / file if file.startswith("t.") else tmp_path, model)


def test_an_array_by_columns_or_with_its_bytes_swapped_is_read(model: Model, tmp_path: Path) -> None:
    rows = np.arange(768, dtype=np.float32).reshape(3, 256)
    for other in (np.asfortranarray(rows), rows.astype(">f4"), rows.astype("<f8"), rows.astype(">i4")):
        np.save(tmp_path / "embd.npy", other)
        np.testing.assert_array_equal(loaded(tmp_path, model)["embd"], rows)


def test_what_float32_does_not_hold_is_infinite(model: Model, tmp_path: Path) -> None:
    np.save(tmp_path / "embd.npy", np.full((3, 256), 1e300))
    with without_warnings():
        assert np.isinf(loaded(tmp_path, model)["embd"]).all()


@pytest.mark.parametrize("name", ["embd", "weights/blk.0.attn_q.weight", "weights/nothing", "unheard"])
def test_a_bomb_is_not_unpacked(name: str, model: Model, tmp_path: Path) -> None:
    count = 40_000_000
    with zipfile.ZipFile(tmp_path / "t.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
            member.write(npy(described(f"({count},)", "'|u1'")))
            for _ in range(10):
                member.write(bytes(count // 10))
        if name.startswith(("weights/nothing", "unheard")):
            archive.writestr("embd.npy", npy(described("(3,)"), bytes(12)))  # refused, after the other
    assert str([3] if name.startswith(("weights/nothing", "unheard")) else [count]) in refused(
        tmp_path / "t.npz", model
    )


def test_members_that_are_no_arrays_are_named(model: Model, tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", embd=ROWS)
    with zipfile.ZipFile(tmp_path / "t.npz", "a") as archive:
        archive.writestr("notes.txt", "hello")
    assert loaded(tmp_path / "t.npz", model).info.producer["extra"] == ["notes.txt"]


def test_a_raw_file_of_any_size_is_not_read(model: Model, tmp_path: Path) -> None:
    for name in ("l_out-0.f32", "l_out-0.bf16", "weights/blk.0.attn_q.weight.f16"):
        (tmp_path / "dump" / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / "dump" / name).open("wb") as file:
            file.truncate(1 << 33)
        assert str((1 << 33) // (4 if name.endswith("f32") else 2)) in refused(tmp_path / "dump", model)
        (tmp_path / "dump" / name).unlink()


def test_a_directory_of_everything_is_no_dump(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamadiff.candidates.dump.MAX_FILES", 20)
    for number in range(30):
        (tmp_path / f"{number}.npy").touch()
    assert "holds more than 20 files" in refused(tmp_path, model)


@pytest.mark.parametrize(
    "stated", [{"model": {"sha256": "f" * 100_000}}, {"producer": {"settings": {"type_v": "F" * 100_000}}}], ids=list
)
def test_a_long_value_is_quoted_in_part(stated: dict[str, object], model: Model, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    metadata = {KEY: json.dumps({"schema": SCHEMA, "tokens": TOKENS, **stated})}
    save_file({"embd": ROWS}, tmp_path / "t.safetensors", metadata)
    with pytest.raises(UserError, match=r"the candidate was recorded with") as caught:
        judge(model, record(model.engine, TOKENS, "right"), loaded(tmp_path / "t.safetensors", model), USUAL)
    assert len(str(caught.value)) < 400


def test_a_trace_of_other_digits_has_no_such_tap(model: Model, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    metadata = {KEY: json.dumps({"schema": SCHEMA, "tokens": TOKENS})}
    save_file({"l_out-\u0660": ROWS, "embd": ROWS}, tmp_path / "t.safetensors", metadata)
    assert "l_out-0" not in loaded(tmp_path / "t.safetensors", model)


# -- maps and tolerances ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[kq]\nname = "x{i}"\ndone = [[1]]', r"done = \[1\]: known are"),
        ('[kq]\nname = "x{i}"\ndone = {a = 1}', "done = .*: known are"),
        ("[kq]\ndone = " + "[" * 200 + "]" * 200, "done = nested too deep: known are"),
        ('[l_out]\ndone = ["permuted"]', "'permuted' is not for a l_out"),
        ('[l_out]\ndone = ["repeated"]', "'repeated' is not for a l_out"),
        ('[l_out]\ndone = ["unweighted"]', "'unweighted' is not for a l_out"),
        ('[kq]\ndone = ["times 1e-99"]', "'times 1e-99': known are"),
        ('[embd]\naxes = "batch batch token embd"', "axes = .*perhaps batch"),
        ('[embd]\naxes = "batch*token embd"', "axes = .*perhaps batch"),
        (f"[embd]\nname = {'9' * 5000}", "not TOML"),
        (f"[{'x' * 100_000}]", "is no tap"),
        (f"[embd]\nname = [{'1,' * 20_000}]", "is no name"),
        ("[" * 100_000, "not TOML"),
        ("x" * 2_000_000, "more than 1 MiB"),
        ("embd = \udcff", "is not text"),
    ],
    ids=lambda text: text[:30],
)
def test_a_hostile_map_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=message) as caught:
        load_map(str(tmp_path / "map.toml"))
    assert len(str(caught.value)) < 400
    assert len(str(caught.value).splitlines()) == 1


def test_one_treatment_needs_no_list(model: Model, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('[embd]\ndone = "times 2"', encoding="utf-8")
    np.save(tmp_path / "embd.npy", ROWS)
    assert (loaded(tmp_path, model, str(tmp_path / "map.toml"))["embd"] == 0.5).all()


def test_a_name_of_many_layers_is_found_at_once(model: Model, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('[l_out]\nname = "' + "{i}" * 40 + 'x"', encoding="utf-8")
    np.save(tmp_path / ("1" * 100 + ".npy"), ROWS)
    np.save(tmp_path / "embd.npy", ROWS)
    assert list(loaded(tmp_path, model, str(tmp_path / "map.toml"))) == ["embd"]  # or never: there are 10^28 ways to


def test_a_layer_may_be_numbered_with_zeros(model: Model, tmp_path: Path) -> None:
    np.save(tmp_path / "l_out-000.npy", ROWS)
    assert list(loaded(tmp_path, model)) == ["l_out-0"]


@pytest.mark.parametrize("text", ["[[rule]]\nmatch = 1\n" * 1001, "rule = " + "[" * 300, f"[[rule]]\n{'x' * 999} = 1"])
def test_hostile_tolerances_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"t\.toml: ") as caught:
        load_rules(tmp_path / "t.toml")
    assert len(str(caught.value)) < 400


def test_axes_of_a_graph_are_named_by_the_vocabulary() -> None:
    tap = taps.Tap(taps.Kind("embd", "GET_ROWS", "", ("token", "256"), ""), None)
    graph = SimpleNamespace(sizes={"head": 4, "kv_head": 2, "dim": 64})
    rows = np.arange(768, dtype=np.float32).reshape(1, 3, 256)
    np.testing.assert_array_equal(name_map.fit_to_tap(rows, tap, load_map("hf")["embd"], graph, 3), rows[0])
    for shape in ((3, 255), (2, 3, 256), (256, 3)):
        with pytest.raises(UserError, match=r"needs \[3, 256\]"):
            name_map.fit_to_tap(np.ones(shape, np.float32), tap, load_map("llama.cpp")["embd"], graph, 3)
    odd = taps.Tap(taps.Kind("l_out", "ADD", "", ("2", "token", "128"), ""), 0)
    with pytest.raises(UserError, match="its axes have no names"):
        name_map.fit_to_tap(rows, odd, load_map("hf")["l_out"], graph, 3)


# -- what is no file -------------------------------------------------------------------------------


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


MADE: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo, "socket": a_socket, "directory": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"), "nothing": lambda path: path.symlink_to("no-such"),
}  # fmt: skip
READ: dict[str, Callable[[Path, Model], object]] = {
    "tolerance": lambda path, model: load_rules(path),
    "map": lambda path, model: load_map(str(path)),
    "trace": lambda path, model: Trace.open(path),
    "model": lambda path, model: Model(path),
    "candidate": loaded,
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("reader", READ)
def test_what_is_no_file_is_refused_at_once(reader: str, kind: str, model: Model, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    MADE[kind](path)
    with pytest.raises(UserError) as caught:  # or it waits for ever, or reads without end
        READ[reader](path, model)
    is_empty_dump = (reader, kind) == ("candidate", "directory")
    assert ("holds no tensors" if is_empty_dump else str(path)) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


NO_FILES = [
    (name, kind)
    for name in ("embd.npy", "embd.f32", "embd.txt", "tokens", "embd.json")
    for kind in ("pipe", "socket", "directory", "device")
    if kind != "directory" or name in ("tokens", "embd.json")
]


@pytest.mark.parametrize(("name", "kind"), NO_FILES)
def test_what_is_no_file_in_a_dump_is_refused_at_once(name: str, kind: str, model: Model, tmp_path: Path) -> None:
    if name == "embd.json":
        ROWS.tofile(tmp_path / "embd.f32")
    np.save(tmp_path / "result_norm.npy", np.ones((3, 255), np.float32))
    MADE[kind](tmp_path / name)
    assert str(tmp_path / name) in refused(tmp_path, model)


@pytest.mark.parametrize("name", ["embd.npy", "embd.f32", "embd.txt"])
def test_a_directory_in_a_dump_is_one_like_any_other(name: str, model: Model, tmp_path: Path) -> None:
    np.save(tmp_path / "result_norm.npy", np.ones((3, 256), np.float32))
    (tmp_path / name).mkdir()
    assert list(loaded(tmp_path, model)) == ["result_norm"]


def test_a_pipe_that_somebody_writes_to_is_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"[[rule]]\nmatch = 0.25\n")
    os.close(writing)
    assert load_rules(Path(f"/dev/fd/{reading}"))[0].match == 0.25
    os.close(reading)


def test_a_pipe_that_stays_silent_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamadiff.system.input.SILENCE", 0.1)
    reading, writing = os.pipe()
    with pytest.raises(UserError, match=r"nothing came for 0\.1 s"):
        load_rules(Path(f"/dev/fd/{reading}"))
    os.close(reading)
    os.close(writing)


# -- models ----------------------------------------------------------------------------------------


def with_shape(source: bytes, name: bytes, shape: tuple[int, ...]) -> bytes:
    """A GGUF file whose tensor has another shape."""
    place = source.index(name) + len(name)
    (axes,) = struct.unpack_from("<I", source, place)
    return source[:place] + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + source[place + 4 + 8 * axes :]


def hostile_model(path: Path, change: Callable[[bytes], bytes]) -> str:
    """The one line with which a changed model is refused; nothing is warned of."""
    small.write_model(path, layers=1)
    path.write_bytes(change(path.read_bytes()))
    with without_warnings(), pytest.raises(UserError) as caught:
        Model(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 600
    return str(caught.value)


NO_AXES, CUT = "has 0 axes, []; 1 to 4 have values", "it ends at byte"


@pytest.mark.parametrize(
    ("tensor", "shape", "words"),
    [
        (b"blk.0.attn_q.weight", (), NO_AXES),
        (b"blk.0.attn_q.weight", (0, 256), "has 2 axes, [0, 256]; 1 to 4 have values"),
        (b"blk.0.attn_q.weight", (256,), CUT),
        (b"blk.0.attn_q.weight", (256, 128, 2), CUT),
        (b"blk.0.attn_q.weight", (1, 1, 256, 256), CUT),
        (b"blk.0.attn_q.weight", (1, 1, 1, 256, 256), "has 5 axes, []; 1 to 4 have values"),
        (b"blk.0.attn_q.weight", (256, 1 << 63), "Maximum allowed dimension exceeded"),
        (b"blk.0.attn_q.weight", (1 << 32, 1 << 32), "cannot reshape array of size 0"),
        (b"blk.0.ffn_down.weight", (), NO_AXES),
        (b"blk.0.ffn_down.weight", (512,), "blk.0.ffn_down.weight: rows of 512 weights, shape [512]"),
        (b"blk.0.attn_norm.weight", (), NO_AXES),
        (b"blk.0.attn_norm.weight", (1, 256), CUT),
        (b"token_embd.weight", (), NO_AXES),
        (b"token_embd.weight", (96,), CUT),
        (b"token_embd.weight", (256, 8, 12), CUT),
        (b"token_embd.weight", (256, 0), "has 2 axes, [256, 0]; 1 to 4 have values"),
        (b"output_norm.weight", (), NO_AXES),
    ],
    ids=str,
)
def test_a_tensor_of_other_axes_is_refused(tensor: bytes, shape: tuple[int, ...], words: str, tmp_path: Path) -> None:
    assert words in hostile_model(tmp_path / "m.gguf", lambda data: with_shape(data, tensor, shape))


def test_a_tensor_of_a_long_name_is_refused(tmp_path: Path) -> None:
    name = f"blk.{'9' * 4500}.attn_q.weight".encode()
    old = b"blk.0.attn_q.weight"

    def renamed(data: bytes) -> bytes:
        place = data.index(old)
        return data[: place - 8] + struct.pack("<Q", len(name)) + name + data[place + len(old) :]

    assert "has 4518 bytes; up to 63 are allowed" in hostile_model(tmp_path / "m.gguf", renamed)


def test_a_layer_of_fifty_digits_is_refused(tmp_path: Path) -> None:
    small.write_model(tmp_path / "m.gguf", tensors={f"blk.{'9' * 50}.a.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(UserError, match="tensors of 3 layers"):
        Model(tmp_path / "m.gguf")


def test_an_array_of_arrays_is_refused(tmp_path: Path) -> None:
    def nested(data: bytes) -> bytes:
        place = data.index(b"llama.context_length") + len(b"llama.context_length")
        inner = struct.pack("<IQ", gguf.GGUFValueType.UINT32, 0)
        outer = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.ARRAY, 1)
        return data[:place] + outer + inner + data[place + 8 :]

    assert "is one of arrays" in hostile_model(tmp_path / "m.gguf", nested)


def test_weights_that_are_no_numbers_are_read_without_a_warning(tmp_path: Path) -> None:
    garbage = np.full((256, 256 // 32 * 34), 0xFF, np.uint8), gguf.GGMLQuantizationType.Q8_0
    garbage[0].reshape(-1, 34)[:, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    small.write_model(tmp_path / "m.gguf", layers=1, tensors={"blk.0.attn_q.weight": garbage})
    with without_warnings():
        assert not np.isfinite(Model(tmp_path / "m.gguf").weights.whole("blk.0.attn_q.weight")).any()
