"""What lies in the folder of a symptom's page: a model, and what an engine with that symptom's bug recorded."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import servers
from command import run
from misread import decode
from models.options import OPTIONS
from models.small import write_model
from places import ROOT, TESTS
from proof.injected import BUGS
from proof.strangers.arithmetic import BY_NAME
from proof.strangers.engine import Engine
from proof.strangers.model import read
from proof.strangers.recording import save
from prose import bert

from llamadiff.llamacpp.shipped import shipped_model

STORY = (1, 403, 407, 261, 378, 277, 271, 303)
ADDRESS = "http://localhost:8080"  # what pages call a server


def recorded(
    bug: str, tokens: Sequence[int] = STORY, n_prefill: int = 0, model: str = "", name: str = "mine.safetensors"
) -> Callable[[Path], None]:
    """A scene: the model, the shipped one or a small one, and the trace of an engine with this bug."""

    def prepare(folder: Path) -> None:
        path = folder / "model.gguf"
        if model:
            write_model(path, **OPTIONS[model])
        else:
            shipped(folder)
        taps = Engine(read(path), BY_NAME["float32"], BUGS[bug]).run(tokens, n_prefill)
        save(folder / name, taps, tokens, n_prefill, name="mine")

    return prepare


def shipped(folder: Path) -> None:
    shutil.copy(shipped_model(), folder / "model.gguf")


def misread(folder: Path) -> None:
    """The shipped model in both types, and its weights as a decoder gives them that takes nibbles for neighbours."""
    shutil.copy(shipped_model(), folder / "good.gguf")
    shutil.copy(shipped_model(quantized=True), folder / "small.gguf")
    (folder / "mine").mkdir()
    for tensor in gguf.GGUFReader(folder / "small.gguf").tensors:
        kind = tensor.tensor_type
        values = gguf.quants.dequantize(tensor.data, kind)
        if kind.name == "Q4_K":
            blocks = tensor.data.reshape(len(tensor.data), -1, gguf.GGML_QUANT_SIZES[kind][1])
            values = decode("Q4_K", blocks, "nibbles are neighbours").reshape(values.shape)
        np.save(folder / "mine" / f"{tensor.name}.npy", values.astype("f4"))


def on_a_device(folder: Path) -> None:
    """A run carried here from another machine, on which a kernel leaves out the last row of the first norm."""
    shipped(folder)
    path = folder / "gpu.nodes"
    done = run("capture", folder / "model.gguf", "Once upon a time", "--nodes", "-o", path)
    assert done.returncode == 0, done.stderr
    data, parts, wanted = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[0] + b"\n", [], False
    while data:
        line, _, data = data.partition(b"\n")
        said = json.loads(line)
        size = sum(said["sizes"]) if "sizes" in said else 0
        values, data = data[:size], data[size:]
        if wanted and "computed" in said:
            values, wanted = values[: size * 4 // 5] + bytes(size // 5), False
        wanted = wanted or said.get("node", {}).get("name") == "norm-0"
        parts += [line, b"\n", values]
    changed = b"".join(parts)
    path.write_bytes(changed + json.dumps({"sha256": hashlib.sha256(changed).hexdigest()}).encode() + b"\n")


def embedding(folder: Path) -> None:
    """A small BERT, and the trace of an engine that counts positions as RoBERTa does."""
    bert.write_model(folder / "model.gguf")
    save(folder / "mine.safetensors", bert.run(folder / "model.gguf", STORY, first_position=2), STORY, name="mine")


CONVERTER = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from ext.file.conversion.converter import convert
convert(Path(sys.argv[1]), "qwen3", Path(sys.argv[3]), "F32", {mistake!r})
"""


def port(folder: Path) -> None:
    """A checkpoint without weights; a converter that does not write RoPE's base, and one that does."""
    import transformers
    from ext.file.conversion.checkpoints import MODELS, write_tokenizer

    kind, options = MODELS["qwen3"]
    config = getattr(transformers, f"{kind}Config")(**options, architectures=[f"{kind}ForCausalLM"])
    config.save_pretrained(folder / "checkpoint")
    write_tokenizer(folder / "checkpoint")
    for name, mistake in (("llama.cpp", "rope-base"), ("mended", None)):
        (folder / name).mkdir()
        text = CONVERTER.format(tests=str(TESTS), mistake=mistake)
        (folder / name / "convert_hf_to_gguf.py").write_text(text, encoding="utf-8")


SCENES: dict[str, Callable[[Path], None]] = {
    "gibberish-from-the-first-token": recorded("rope: other layout"),
    "gibberish-from-the-second-token": recorded("rope: steps restart", n_prefill=5),
    "right-on-cpu-wrong-on-gpu": on_a_device,
    "right-in-f16-wrong-quantized": misread,
    "right-until-4096-tokens": recorded("rope: scaling ignored", range(1, 60), model="llama-yarn"),
    "server-dumber-than-llama-cpp": shipped,
    "embedding-is-off": embedding,
    "my-port": port,
    "nan": recorded("half: up overflows", (1, 17, 5, 80, 42, 9, 33), model="llama-large"),
}


@contextmanager
def prepared(page: str, folder: Path) -> Iterator[dict[str, str]]:
    """The folder of a page, and what takes the place of words in its commands: the address of a server that it asks."""
    SCENES.get(page, lambda _: None)(folder)
    replaced = {"CLONE": str(ROOT)}
    if page.startswith("server"):
        with servers.started(folder / "model.gguf", "--mistake", "bos-twice") as url:
            yield {**replaced, ADDRESS: url}
    else:
        yield replaced
