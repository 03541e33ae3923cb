"""Every reader of foreign files, each with a way to make it a hostile one.

A reader is a function (rng, folder): it writes files, and returns what reads them and must succeed or raise UserError.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gguf
import numpy as np
from safetensors.numpy import save, save_file

from llamadiff.candidates.arrays import RAW
from llamadiff.candidates.map_file import load_map
from llamadiff.candidates.name_map import Map, identity_map
from llamadiff.candidates.opening import resolve
from llamadiff.candidates.reference import record
from llamadiff.candidates.source import Context
from llamadiff.cli import inputs
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.file.opening import judge_weights
from llamadiff.ext.file.report import weights_to_csv, weights_to_json, weights_to_markdown
from llamadiff.ext.graph.backend import judge_graph
from llamadiff.ext.graph.repro import load
from llamadiff.ext.prompt import chat_template
from llamadiff.ext.prompt.tokens import of_checkpoint
from llamadiff.judge.preflight.checks import check_runnable
from llamadiff.judge.sketching import sketch_of
from llamadiff.numerics import tolerances
from llamadiff.report.json import to_json
from llamadiff.trace.metadata import KEY, SCHEMA
from llamadiff.trace.reader import Trace
from llamadiff.verbs.tolerance_file import load_rules
from llamadiff.verbs.verbs import diff, record_nodes
from proof.fuzz import mutating

Read = Callable[[], object]
READERS: dict[str, Callable[[Random, Path], Read]] = {}
SLOW = {"template": 10, "nodes": 10}  # cases of these are run by one in so many: each starts a process

TOKENS = (1, 17, 5)
SMALL = {"EMBD": 32, "FF": 64, "VOCAB": 40, "DIM": 16}


def reader(make: Callable[[Random, Path], Read]) -> Callable[[Random, Path], Read]:
    READERS[make.__name__] = make
    return make


@cache
def world() -> SimpleNamespace:
    """What is right: a model, its trace, the files of it."""
    from models import small

    folder = Path(mkdtemp(prefix="llamadiff-fuzz-"))
    with mock.patch.multiple(small, **SMALL):
        model = Model(
            small.write_model(folder / "m.gguf", layers=2, extra={"rope.freq_base": 5e5}, tokenizer=_tokenizer)
        )
    trace = record(model.engine, TOKENS, "mine")
    arrays = {name: np.ascontiguousarray(trace[name]) for name in trace}
    info = {
        "schema": SCHEMA, "tokens": TOKENS, "positions": [0, 1, 2], "n_prefill": 3, "prompt": "a b",
        "producer": {"name": "mine", "version": "1", "settings": {"type_k": "F16", "flash_attn": False},
                     "hyperparameters": {"rope.freq_base": 5e5}, "weights_read": ["token_embd.weight"]},
        "model": {"sha256": model.sha256, "architecture": "llama", "file": "m.gguf"},
    }  # fmt: skip
    save_file(arrays, folder / "t.safetensors", {KEY: json.dumps(info)})
    taps, right = [name for name, array in arrays.items() if array.size < 400], Trace.open(folder / "t.safetensors")
    return SimpleNamespace(
        folder=folder, model=model, arrays=arrays, info=info, taps=taps, trace=right, sketch=sketch_of(right),
        data=model.path.read_bytes(), spans=gguf_spans(model.path), op=saved_op(folder / "op"),
    )  # fmt: skip


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    texts = ["<unk>", "<s>", "</s>", "\u2581", "<0x0A>", *(f"piece{i}" for i in range(SMALL["VOCAB"] - 5))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores([0.0] * len(texts))
    writer.add_token_types([2, 3, 3, *[1] * (len(texts) - 3)])
    writer.add_bos_token_id(1)
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")


def load_candidate(path: Path, mapping: Map | None = None) -> Trace:
    """A candidate as compare takes it, all of its values looked at."""
    model = world().model
    trace = resolve(str(path), Context(model, TOKENS, len(TOKENS), mapping or identity_map()))
    check_runnable(model, trace, "the candidate")
    for name in trace:
        with np.errstate(all="ignore"):
            np.asarray(trace[name]).sum(dtype=np.float64)
    return trace


def put(path: Path, content: str) -> None:
    """A text file, of whatever there is in the text."""
    path.write_bytes(content.encode("utf-8", "surrogatepass"))


# -- dumps -----------------------------------------------------------------------------------------


def tap_name(rng: Random) -> str:
    """A name that a dump may have; mostly a good one."""
    name = rng.choice(world().taps)
    others = (f"{name}@-1", f"{name}@{rng.randrange(-4, 4)}", "weights/blk.0.attn_norm.weight", "mine")
    return name if rng.random() < 0.7 else rng.choice(others)


def array(rng: Random, name: str) -> np.ndarray:
    """Values of a tap; sometimes of another shape or type."""
    whole = world().arrays.get(name.partition("@")[0], np.ones((3, 32), np.float32))
    whole = whole[0] if "@" in name or name.startswith("weights/") else whole
    with np.errstate(all="ignore"):
        if rng.random() < 0.15:
            whole = rng.choice((whole[:1], whole[None], whole.T, whole.reshape(-1), whole[..., :-1], whole * 3e38))
        return whole.astype(rng.choice((*["<f4"] * 10, *[">f4", "<f8", "<f2", "<i4", "u1"] * 2, "?", "<c8", "<U3")))


def npy_bytes(rng: Random, name: str) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asfortranarray(array(rng, name)) if rng.random() < 0.2 else array(rng, name))
    whole = file.getvalue()
    if rng.random() < 0.2:
        return whole
    if rng.random() < 0.6:  # its header, which is text
        start, end = whole.index(b"{"), whole.index(b"\n") + 1
        head = mutating.text(rng, whole[start:end].decode("latin-1")).encode("latin-1", "replace")
        size = len(head) % 65536 if rng.random() < 0.7 else rng.choice((0, 1, 118, 65535))
        return whole[:8] + struct.pack("<H", size) + head + whole[end:]
    return mutating.data(rng, whole, [(6, 1), (8, 2), (10, 60), (len(whole) - 8, 8)])


@reader
def npy(rng: Random, folder: Path) -> Read:
    name = tap_name(rng)
    path = folder / f"{name}.npy"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(npy_bytes(rng, name))
    return partial(load_candidate, folder)


@reader
def npz(rng: Random, folder: Path) -> Read:
    names = list(dict.fromkeys(tap_name(rng) for _ in range(rng.randrange(1, 4))))
    file = io.BytesIO()
    method = rng.choice((*(zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) * 9, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(file, "w", method) as archive:
        for name in names:
            inner = npy_bytes(rng, name) if rng.random() < 0.2 else npy_of(array(rng, name))
            inner += bytes(20_000_000) if rng.random() < 0.01 else b""
            archive.writestr(rng.choice((f"{name}.npy",) * 18 + (name, f"{name}.npy.npy")), inner)
    whole = file.getvalue()
    if rng.random() < 0.5:
        whole = mutating.data(rng, whole, zip_spans(whole))
    (folder / "t.npz").write_bytes(whole)
    return partial(load_candidate, folder / "t.npz")


STORAGES = {"<f4": b"Float", "<f8": b"Double", "<f2": b"Half", "<i4": b"Int", "|u1": b"Byte", "|b1": b"Bool"}


def pickled(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A dict of tensors as torch.save pickles it."""
    program = b"\x80\2}("
    for number, (name, values) in enumerate(arrays.items()):
        kind = STORAGES.get(values.dtype.str, b"Odd")
        about = text_of("storage") + b"ctorch\n" + kind + b"Storage\n" + text_of(str(number)) + text_of("cpu")
        strides = [step // values.itemsize for step in values.strides]
        program += text_of(name) + b"ctorch._utils\n_rebuild_tensor_v2\n((" + about + whole_of(values.size) + b"tQ"
        program += whole_of(0) + b"".join(
            b"(" + b"".join(map(whole_of, some)) + b"t" for some in (values.shape, strides)
        )
        program += b"\x89ccollections\nOrderedDict\n)RtR"
    return program + b"u."


def text_of(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def whole_of(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)


@reader
def pt(rng: Random, folder: Path) -> Read:
    """A folder of ranks and steps, or one file, of which one is spoilt."""
    names = list(dict.fromkeys(tap_name(rng) for _ in range(rng.randrange(1, 4))))
    ranks, steps = rng.choice((1, 1, 2)), rng.choice((1, 1, 2))
    for rank in range(ranks):
        for step in range(steps):
            arrays = {name: np.ascontiguousarray(array(rng, name)) for name in names}
            program = pickled(arrays)
            if rng.random() < 0.3:
                program = mutating.data(rng, program, [(2, len(program) - 2)])
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("x/data.pkl", program)
                for number, values in enumerate(arrays.values()):
                    archive.writestr(f"x/data/{number}", values.tobytes())
            whole = file.getvalue()
            if rng.random() < 0.3:
                whole = mutating.data(rng, whole, zip_spans(whole))
            path = folder / f"step_{step}" / f"{rng.choice(('rank', 'tp', 'mine'))}{rank}.pt"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(whole)
    return partial(load_candidate, folder)


def npy_of(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def zip_spans(whole: bytes) -> list[tuple[int, int]]:
    """The fields of a zip file's headers."""
    fields = {
        b"PK\x03\x04": ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2), (30, 10)),
        b"PK\x01\x02": ((6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 4), (42, 4), (46, 10)),
        b"PK\x05\x06": ((4, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    }  # fmt: skip
    spans, place = [], 0
    while (place := whole.find(b"PK", place)) >= 0:
        spans += [(place + start, size) for start, size in fields.get(whole[place : place + 4], ())]
        place += 2
    return spans


@reader
def raw(rng: Random, folder: Path) -> Read:
    name, suffix = tap_name(rng), rng.choice((".f32", ".f32", ".f16", ".bf16"))
    values = array(rng, name)
    if rng.random() < 0.8:
        values = np.zeros(values.shape, RAW[suffix])
    path = folder / (name + suffix)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(mutating.data(rng, values.tobytes()) if rng.random() < 0.3 else values.tobytes())
    if rng.random() < 0.8:
        shape: Any = {"shape": list(values.shape)}
        put(path.with_suffix(".json"), mutating.json_text(rng, shape) if rng.random() < 0.7 else json.dumps(shape))
    return partial(load_candidate, folder)


@reader
def text(rng: Random, folder: Path) -> Read:
    name = tap_name(rng)
    forms = ("[{i}] = {v}", "{i}: {v}", "{v}", "{v},", "  [ {i} ] : {v} ")
    form, values = rng.choice(forms), array(rng, name).reshape(-1)[: rng.randrange(1, 60)]
    whole = "\n".join(form.format(i=i, v=v) for i, v in enumerate(values))
    path = folder / (name + rng.choice((".txt", ".log", ".dat")))
    path.parent.mkdir(exist_ok=True)
    put(path, mutating.text(rng, whole))
    return partial(load_candidate, folder)


@reader
def tokens(rng: Random, folder: Path) -> Read:
    whole = rng.choice(("1, 17, 5", "[1, 17, 5]", "1\n17\n5\n"))
    content = mutating.text(rng, whole).encode("utf-8", "surrogatepass")
    content = mutating.data(rng, content) if rng.random() < 0.2 else content
    np.save(folder / "embd.npy", world().arrays["embd"])
    path = folder / rng.choice(("tokens", "tokens.txt", "tokens.json"))
    path.write_bytes(content)
    if rng.random() < 0.5:
        return partial(load_candidate, folder)
    return partial(inputs.token_ids, None, path)


# -- safetensors -----------------------------------------------------------------------------------


def safetensors_bytes(rng: Random, arrays: Mapping[str, np.ndarray], info: Any) -> bytes:
    """A file of which the metadata (mostly), the header or the bytes are changed."""
    way = rng.random()
    metadata = json.dumps(mutating.value(rng, info) if way < 0.5 else info)
    metadata = mutating.text(rng, metadata).encode("utf-8", "replace").decode() if 0.5 <= way < 0.57 else metadata
    whole = save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, {KEY: metadata})
    (size,) = struct.unpack("<Q", whole[:8])
    if 0.57 <= way < 0.7:
        head = mutating.json_text(rng, json.loads(whole[8 : 8 + size])).encode("utf-8", "replace")
        return struct.pack("<Q", len(head)) + head + whole[8 + size :]
    spans = [(0, 8), (8, 2), (8 + size - 40, 40), (len(whole) - 8, 8)]
    return mutating.data(rng, whole, spans) if 0.7 <= way < 0.8 else whole


def some_arrays(rng: Random) -> dict[str, np.ndarray]:
    names = rng.sample(world().taps, rng.randrange(1, 6))
    kinds = (*["<f4"] * 30, *["<f2", "<f8", "<i4", "<i8"] * 4, "u1", "?")
    found = {name: world().arrays[name].astype(rng.choice(kinds)) for name in names}
    if rng.random() < 0.2:
        other = rng.choice(mutating.TEXTS).replace("\ud800", "") or "x"
        found[other] = np.ones(rng.choice(((2, 2), (0, 3), (1,) * 12)), np.float32)
    if rng.random() < 0.2:
        name = rng.choice(names)
        whole = found[name]
        found[name] = rng.choice(
            (whole[:1], whole[None], whole.T, whole[..., :0], np.full_like(whole, rng.choice((0, 1))))
        )
    if rng.random() < 0.2:
        found[names[0]] = np.where(rng.random() < 0.5, np.float32(np.nan), np.float32(3e38)) * np.ones_like(
            found[names[0]]
        )
    return found


@reader
def trace(rng: Random, folder: Path) -> Read:
    path = folder / "t.safetensors"
    path.write_bytes(safetensors_bytes(rng, some_arrays(rng), world().info))
    return partial(load_candidate, path)


@reader
def capture(rng: Random, folder: Path) -> Read:
    """Against the right trace, up to the report."""
    path = folder / "t.safetensors"
    path.write_bytes(safetensors_bytes(rng, some_arrays(rng), world().info))
    return lambda: json.loads(to_json(diff(world().trace, path, how=How(partial=True))))


@reader
def sketch(rng: Random, folder: Path) -> Read:
    """A sketch as the baseline, alone and against the right trace, up to the report."""
    path, right = folder / "t.safetensors", world().sketch
    about = {"seed": right.seed, "projections": right.projections, "taps": dict(right.shapes)}
    packed = [np.concatenate([rows.moments, rows.projected], axis=1) for rows in right.rows.values()]
    path.write_bytes(safetensors_bytes(rng, {"sketch": np.stack(packed)}, {**world().info, "sketch": about}))
    model = world().model.path if rng.random() < 0.2 else None
    return lambda: json.loads(to_json(diff(path, world().trace, model, how=How(partial=True, diagnose=False))))


@reader
def judged(rng: Random, folder: Path) -> Read:
    """Against the right trace and the model, up to the report; the causes left out, which take long."""
    path = folder / "t.safetensors"
    info = {**world().info, "producer": {"name": "mine"}} if rng.random() < 0.5 else world().info
    path.write_bytes(safetensors_bytes(rng, some_arrays(rng), info))
    return lambda: json.loads(
        to_json(diff(world().trace, path, world().model.path, how=How(partial=True, diagnose=False)))
    )


@reader
def op(rng: Random, folder: Path) -> Read:
    (folder / "op.safetensors").write_bytes(mutating.data(rng, world().op, [(0, 8), (8, 200), (100, 400)]))
    return partial(load, folder / "op.safetensors")


def saved_op(path: Path) -> bytes:
    from llamadiff.ext.graph.op import Op, Operand
    from llamadiff.ext.graph.repro import save as save_op

    x = np.ones((1, 1, 3, 4), np.float32)
    save_op(path, Op("ADD", (4, 3, 1, 1), "F32", bytes(64), (Operand(x, "F32", "a"), None)), x, x, "node")
    return path.read_bytes()


@cache
def recorded_nodes() -> tuple[bytes, ...]:
    """Every node of a run of the model: the answers, each with its bytes, but for the last line."""
    path = world().folder / "run.nodes"
    record_nodes(world().model.path, Run(tokens=TOKENS, n_predict=1), path)
    found, file = list[bytes](), io.BytesIO(path.read_bytes())
    while line := file.readline():
        found.append(line + file.read(sum(json.loads(line).get("sizes", ()))))
    return tuple(found[:-1])


@reader
def nodes(rng: Random, folder: Path) -> Read:
    """What was told is changed, or left out, or told twice; the checksum is right, mostly."""
    told = [*recorded_nodes()]
    for _ in mutating.times(rng):
        number, kind = rng.randrange(len(told)), rng.random()
        line, _, data = told[number].partition(b"\n")
        if kind < 0.1:
            told[number : number + 1] = rng.choice(([], [told[number]] * 2))
        elif kind < 0.2:
            told[number] = mutating.data(rng, told[number])
        else:
            text = mutating.json_text(rng, json.loads(line)).encode("utf-8", "surrogatepass")
            told[number] = text.replace(b"\n", b" ") + b"\n" + data
    body = b"".join(told)
    end = json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n"
    whole = body + (end if rng.random() < 0.95 else mutating.data(rng, end))
    (folder / "x.nodes").write_bytes(whole)
    return partial(judge_graph, world().model.path, Run(), recorded=folder / "x.nodes")


# -- settings --------------------------------------------------------------------------------------

MAP = {
    "embd": {"name": "model.embed", "axes": "batch token embd"},
    "Qcur_rope": {"name": "blocks.{i}.attn.q", "axes": "batch head token dim", "done": ["permuted", "times 0.5"]},
    "Kcur_rope": {"name": "k{i}", "done": ["repeated"]},
    "attn_norm": {"name": "norm{i}", "done": ["unweighted"]},
    "kq": {"name": "s{i}", "axes": "query head key", "done": "scaled"},
}
SHAPES = {
    "model.embed": (1, 3, 32),
    "blocks.1.attn.q": (1, 4, 3, 16),
    "k0": (3, 4, 16),
    "norm1": (3, 32),
    "s0": (3, 4, 3),
}
RULES = [{"match": 1e-9, "tap": "l_out-*"}, {"match": 3, "op": "MUL_MAT*", "arithmetic": "*Q8_?", "angle": 0.5}]


def toml_text(rng: Random, tables: Any) -> str:
    """TOML of tables of which a value is changed, or the text."""
    changed = rng.random() < 0.6
    named = mutating.value(rng, tables) if changed else tables
    pairs = (
        named.items()
        if isinstance(named, dict)
        else (("rule", table) for table in named)
        if isinstance(named, list)
        else ()
    )
    lines = list[str]()
    for name, table in pairs:
        lines.append(f"[[{name}]]" if isinstance(tables, list) else f"[{json.dumps(name)}]")
        lines += (
            [f"{json.dumps(key)} = {inline(value)}" for key, value in table.items()]
            if isinstance(table, dict)
            else [inline(table)]
        )
    return "\n".join(lines) if changed else mutating.text(rng, "\n".join(lines))


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {inline(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return {"Infinity": "inf", "NaN": "nan", "null": "[]"}.get(json.dumps(value), json.dumps(value))


@reader
def name_map(rng: Random, folder: Path) -> Read:
    path = folder / "map.toml"
    put(path, toml_text(rng, MAP))
    np.savez(folder / "t.npz", **{name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
    return lambda: load_candidate(folder / "t.npz", load_map(str(path)))


@reader
def tolerance(rng: Random, folder: Path) -> Read:
    path = folder / "t.toml"
    put(path, toml_text(rng, RULES))

    def read() -> None:
        rules = load_rules(path)
        for tap in ("l_out-1", "a" * 200, "Qcur_rope-0"):
            tolerances.rule_for(rules, tap, "MUL_MAT_ID", "Q8_0")

    return read


# -- models ----------------------------------------------------------------------------------------


def gguf_spans(path: Path) -> list[tuple[int, int]]:
    """Place and size of every part of the header: counts, lengths, names, types, values, shapes, offsets."""
    file = gguf.GGUFReader(path)
    start = file.data.__array_interface__["data"][0]
    fields = [*file.fields.values(), *(tensor.field for tensor in file.tensors)]
    parts = [part for field in fields for part in field.parts if part.nbytes]
    return [(part.__array_interface__["data"][0] - start, part.itemsize) for part in parts]


@reader
def model(rng: Random, folder: Path) -> Read:
    path = folder / "m.gguf"
    whole = mutating.data(rng, world().data, world().spans)
    if rng.random() < 0.2:
        old = rng.choice((b"blk.0.attn_q.weight", b"llama.block_count", b"piece7", b"general.architecture", b"llama"))
        whole = whole.replace(
            old, rng.choice(mutating.TEXTS).encode("utf-8", "surrogatepass")[: len(old)].ljust(len(old), b"x"), 1
        )
    path.write_bytes(whole)
    return partial(open_model, path)


def open_model(path: Path) -> None:
    """Open it, describe it, run it."""
    opened = Model(path)
    opened.describe()
    opened.special_token("bos")
    opened.token_texts(tuple(range(-1, 60)))
    record(opened.engine, TOKENS, "mine")


TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}[{{ m.role }}]
{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}{{ raise_exception('no') if false }}{% endif %}
{{ strftime_now('%Y') }}{% set x = namespace(n=3) %}{% for i in range(9) %}{{ 'a' * 7 }}{% endfor %}"""


@reader
def template(rng: Random, folder: Path) -> Read:
    source = mutating.text(rng, TEMPLATE)
    asked = SimpleNamespace(path="m.gguf", chat_template=source, special_token=lambda kind: f"<{kind}>")
    return partial(chat_template.render, asked, "hello")


@cache
def as_checkpoint() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The small model's tensors under Hugging Face's names, as a converter would find them, and its config.json."""
    w = world().model.weights
    parts = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
             "output.weight": "lm_head.weight"}  # fmt: skip
    names |= {
        f"blk.{i}.{stem}.weight": f"model.layers.{i}.{part}.weight" for i in (0, 1) for stem, part in parts.items()
    }
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 256, "rope_theta": 5e5, "vocab_size": 40, "tie_word_embeddings": False,
              "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}  # fmt: skip
    return {theirs: w.whole(ours) for ours, theirs in names.items()}, config


@reader
def checkpoint(rng: Random, folder: Path) -> Read:
    tensors, config = as_checkpoint()
    whole = save(tensors)
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    spans = [(rng.randrange(8, header), rng.randrange(1, 40)) for _ in range(4)]
    (folder / "model.safetensors").write_bytes(mutating.data(rng, whole, spans) if rng.random() < 0.4 else whole)
    put(folder / "config.json", mutating.json_text(rng, config) if rng.random() < 0.6 else json.dumps(config))
    vocab = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>", "special": True}]}
    put(folder / "tokenizer.json", mutating.json_text(rng, vocab))
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    if rng.random() < 0.3:
        put(folder / "model.safetensors.index.json", mutating.json_text(rng, index))
    return partial(compare_with_checkpoint, folder)


def compare_with_checkpoint(folder: Path) -> None:
    """All of it but what starts llama.cpp."""
    with mock.patch.object(of_checkpoint, "ids_oddities", return_value=()):
        report = judge_weights(world().model.path, folder)
    weights_to_json(report), weights_to_csv(report), weights_to_markdown(report)


@reader
def weight_dump(rng: Random, folder: Path) -> Read:
    w = world().model.weights
    for name in rng.sample(sorted(w), 3):
        values, path = w.whole(name), folder / f"{name}.npy"
        values = values if rng.random() < 0.5 else values[..., ::-1] * rng.choice((1.0, np.nan, 1e30))
        whole = npy_of(values)
        path.write_bytes(mutating.data(rng, whole, [(0, 128)]) if rng.random() < 0.3 else whole)
    return partial(compare_with_checkpoint, folder)
