"""Files of torch.save's, read without torch: all types and layouts that it writes; what would run code is refused."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from optional import needs

from llamadiff import UserError
from llamadiff.ext.dumps.pickled import MAX_BYTES, MAX_ITEMS
from llamadiff.ext.dumps.torch_file import tensors_of

TYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
         "float8_e5m2fnuz", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16", "uint32")  # fmt: skip


def read(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.read(1 << 20)[0] for tensor in tensors_of(path)}


@needs("torch")
@pytest.mark.parametrize("dtype", TYPES)
def test_values_of_each_type_are_torchs(dtype: str, tmp_path: Path) -> None:
    import torch

    bits = torch.arange(256, dtype=torch.uint8)
    kind = getattr(torch, dtype)
    values = bits.view(kind) if dtype.startswith("float8") else (bits.to(torch.int32) - 100).clamp(0, 100).to(kind)
    torch.save(values, tmp_path / "x.pt")
    found = read(tmp_path / "x.pt")[""]
    assert np.array_equal(found, values.to(torch.float64).numpy(), equal_nan=True)


@needs("torch")
def test_each_layout_in_memory_is_read(tmp_path: Path) -> None:
    import torch

    whole = torch.arange(24.0).reshape(2, 3, 4)
    views = {
        "turned": whole.permute(2, 0, 1), "part": whole[1:, :, 1:3], "stepped": whole[:, ::2], "row": whole[0, 1],
        "repeated": torch.ones(1).expand(5, 3), "nothing": torch.zeros(0, 4), "number": torch.tensor(3.5),
        "parameter": torch.nn.Parameter(whole), "tied": whole,
    }  # fmt: skip
    torch.save(
        {"a": views, "b": [whole, (whole,), OrderedDict(c=whole)], "c": {"step": 3, 5: whole}}, tmp_path / "x.pt"
    )
    found = read(tmp_path / "x.pt")
    for name, values in views.items():
        assert np.array_equal(found[f"a.{name}"], values.detach().numpy()), name
    assert all(np.array_equal(found[name], whole.numpy()) for name in ("b.0", "b.1.0", "b.2.c", "c.5"))
    assert len(found) == len(views) + 4


@needs("torch")
def test_a_model_on_a_gpu_and_older_protocols_are_read(tmp_path: Path) -> None:
    import torch

    state = torch.nn.Linear(3, 2).state_dict()
    for protocol in (2, 3, 4):
        torch.save(state, tmp_path / "x.pt", pickle_protocol=protocol)
        assert np.array_equal(read(tmp_path / "x.pt")["weight"], state["weight"].numpy())
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:  # as it is written from a GPU
        members = {name: archive.read(name) for name in archive.namelist()}
    members["x/data.pkl"] = members["x/data.pkl"].replace(b"\x8c\x03cpu", b"\x8c\x06cuda:1")
    assert b"cuda:1" in members["x/data.pkl"]
    frame = members["x/data.pkl"].index(b"\x95")
    assert frame == 2
    packed(tmp_path / "gpu.pt", members)
    assert np.array_equal(read(tmp_path / "gpu.pt")["weight"], state["weight"].numpy())


@needs("torch")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: t.ones(2).to_sparse(), None),
        (lambda t: t.quantize_per_tensor(t.ones(2), 0.1, 0, t.qint8), None),
        (lambda t: t.ones(2, dtype=t.complex64), "has a tensor of type ComplexFloatStorage; save it as x.float"),
    ],
    ids=["sparse", "quantized", "complex"],
)
def test_other_kinds_of_tensors_are_left_out_or_refused(make, message, tmp_path: Path) -> None:
    import torch

    torch.save({"x": make(torch), "y": torch.ones(2)}, tmp_path / "x.pt")
    if message is None:
        assert list(read(tmp_path / "x.pt")) == ["y"]
    else:
        refused(tmp_path / "x.pt", message)


@needs("torch")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_other_forms_of_files_are_refused(tmp_path: Path) -> None:
    import torch

    torch.save(torch.ones(2), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "old.pt", "is a pickle of the old form, which torch 1.6 replaced by an archive")
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "program.pt")
    refused(tmp_path / "program.pt", "is a program (TorchScript)")
    torch.save(torch.ones(1000), tmp_path / "cut.pt")
    whole = (tmp_path / "cut.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "cut.pt", "is no archive of torch.save")


def refused(path: Path, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def packed(path: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


class Bomb:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("within", [lambda bomb: bomb, lambda bomb: {"embd": bomb}, lambda bomb: [1, {"x": (bomb,)}]])
def test_what_a_pickle_would_call_is_not_called(within, protocol: int, tmp_path: Path) -> None:
    bomb = Bomb(open, str(tmp_path / "opened"), "w")
    packed(tmp_path / "x.pt", {"x/data.pkl": pickle.dumps(within(bomb), protocol)})
    refused(tmp_path / "x.pt", f"its pickle would call {open.__module__}.open, and none of it was run")
    assert not (tmp_path / "opened").exists()
    pickle.loads(pickle.dumps(within(bomb), protocol))
    assert (tmp_path / "opened").exists()


def test_torchs_own_functions_are_not_called_either(tmp_path: Path) -> None:
    """``torch.utils.collect_env.run`` runs a command; it is written down, as all of torch's are, and is no tensor."""
    touch = f"touch {tmp_path / 'opened'}"
    program = b"ctorch.utils.collect_env\nrun\n(X" + len(touch).to_bytes(4, "little") + touch.encode() + b"tR."
    packed(tmp_path / "x.pt", {"x/data.pkl": b"\x80\x02" + program})
    assert read(tmp_path / "x.pt") == {}
    assert not (tmp_path / "opened").exists()


def doubled(times: int) -> bytes:
    """A list that holds a list twice that holds a list twice, and so on."""
    whole: list[object] = []
    for _ in range(times):
        whole = [whole, whole]
    return pickle.dumps(whole, 2)


def endless() -> bytes:
    whole: list[object] = []
    whole.append(whole)
    return pickle.dumps(whole, 2)


def tensor(
    storage: bytes = b"FloatStorage", start: bytes = b"K\0", shape: bytes = b"K\2\x85", strides: bytes = b"K\1\x85"
) -> bytes:
    """The pickle of a tensor of two values in data/0."""
    about = b"(X\7\0\0\0storagectorch\n" + storage + b"\nX\1\0\0\x000X\3\0\0\0cpuK\2tQ"
    return b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" + about + start + shape + strides + b"\x89NtR."


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (doubled(40), f"holds more than {MAX_ITEMS} items, or containers deeper than"),
        (endless(), "or containers deeper than"),
        (b"", "is cut off"),
        (b"\x80\2", "is cut off"),
        (b"\x80\2R.", "takes more than it has"),
        (b"\x80\2(", "is cut off"),
        (b"\x80\2K\1K\1R.", "calls what is no function"),
        (b"\x80\2h\7.", "takes more than it has"),
        (b"\x80\2X\xff\xff\xff\xffa.", "is cut off"),
        (b"\x80\2I123\n.", "has the instruction b'I'"),
        (b"\x80\2cos\nsystem\n\x81.", "has the instruction b'\\x81'"),
        (b"\x80\2K\1](K\1e]u.", "takes more than it has"),
        (b"\x80\2}]K\1s.", "keys that are neither texts nor numbers"),
        (b"\x80\2ccollections\nOrderedDict\nK\1\x85R.", "would call collections.OrderedDict"),
        (tensor(start=b"K\1"), "has a tensor of shape [2] that its storage of 2 values cannot hold"),
        (tensor(start=b"J\xff\xff\xff\xff"), "cannot hold"),
        (tensor(start=b"N"), "cannot hold"),
        (tensor(strides=b"M\xff\xff\x85"), "cannot hold"),
        (tensor(strides=b"J\xff\xff\xff\xff\x85"), "is no shape"),
        (tensor(shape=b"K\2K\2\x86"), "cannot hold"),
        (tensor(shape=b"N"), "expected a shape"),
        (tensor(storage=b"Nothing"), "has a tensor of type Nothing"),
        (tensor().replace(b"X\1\0\0\x000", b"X\1\0\0\x009"), "whose storage is not there"),
        (tensor().replace(b"Q", b"0N"), "whose storage is not there"),
    ],
)
def test_a_hostile_pickle_is_refused(program: bytes, message: str, tmp_path: Path) -> None:
    packed(tmp_path / "x.pt", {"x/data.pkl": program, "x/data/0": bytes(8)})
    refused(tmp_path / "x.pt", message)


def test_a_tensor_made_by_hand_is_read(tmp_path: Path) -> None:
    """The one that the hostile ones are made of."""
    packed(tmp_path / "x.pt", {"x/data.pkl": tensor(), "x/data/0": np.array([1, 2], "<f4").tobytes()})
    assert read(tmp_path / "x.pt")[""].tolist() == [1, 2]


def test_a_tensor_larger_than_its_place_is_not_read(tmp_path: Path) -> None:
    """One value, as many as nobody has memory for."""
    huge = tensor(shape=b"\x8a\5\0\0\0\0\x10\x85", strides=b"K\0\x85")
    packed(tmp_path / "x.pt", {"x/data.pkl": huge, "x/data/0": bytes(8)})
    (only,) = tensors_of(tmp_path / "x.pt")
    assert only.shape == (1 << 36,)
    with pytest.raises(UserError, match="where 256 values are to be had"):
        only.read(256)


@pytest.mark.parametrize(
    ("members", "kind", "message"),
    [
        ({"x/data.pkl": tensor(), "x/data/0": bytes(8)}, zipfile.ZIP_DEFLATED, "has packed storages"),
        ({"x/data.pkl": tensor(), "x/data/0": bytes(8), "x/byteorder": b"big"}, zipfile.ZIP_STORED, "big-endian"),
        ({"x/data.pkl": bytes(MAX_BYTES + 1)}, zipfile.ZIP_DEFLATED, "its pickle has more than"),
        ({"embd.npy": bytes(8)}, zipfile.ZIP_STORED, "another archive"),
    ],
)
def test_a_hostile_archive_is_refused(members: dict[str, bytes], kind: int, message: str, tmp_path: Path) -> None:
    packed(tmp_path / "x.pt", members, kind)
    refused(tmp_path / "x.pt", message)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"PK\3\4", b"hello, you", io.BytesIO().getvalue()):
        (tmp_path / "x.pt").write_bytes(content)
        refused(tmp_path / "x.pt", "is no archive of torch.save")
