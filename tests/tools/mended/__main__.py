"""Public mistakes of 2026 in a release that has them, and in the next one without: what one command says of each.

    python tests/tools/mended [NUMBER...]

They are of llama.cpp, by the number of the pull request that mended them (docs/found.md), and of xllamacpp, which has a
prebuilt one: releases are installed into build/mended, 100 MB each. Exit code 1: a command does not say so any more.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1])]

from builds import HEADERS  # noqa: E402
from ext.heads import head_models  # noqa: E402
from ext.preprocess.strangers import photograph, tone, write_wav  # noqa: E402
from models.vision_model import CLIP, write_hearing, write_qwen2vl  # noqa: E402
from places import ROOT  # noqa: E402
from tools.parts import run  # noqa: E402

from llamadiff.llamacpp.shipped import shipped_model  # noqa: E402

FOLDER = ROOT / "build" / "mended"
EMBD = 256  # of the shipped model
TOKENS = "1,17,5,80,42,9,3,77,30,12,64,100"
LETTERS = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz", "<0x0A>"]
PROCESSORS = {
    "eye": {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 6272, "max_pixels": 12845056,
            "patch_size": 14, "merge_size": 2, "image_mean": CLIP["mean"], "image_std": CLIP["std"]},
    "ear": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80},
}  # fmt: skip


@dataclass(frozen=True)
class Mended:
    """A mistake: what shows it (``shown``: package -> command words for each thing to judge), and in which releases."""

    shown: Callable[[Path], Iterator[list[object]]]
    before: str
    after: str


def installed(release: str) -> Path:
    place = FOLDER / f"xllamacpp-{release}"
    if not place.is_dir():
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:",
            "--target", place, f"xllamacpp=={release}")  # fmt: skip
    return place


def text_model() -> Path:
    """The shipped model, with a context that has room for sounds."""
    path = FOLDER / "text.gguf"
    shutil.copy2(shipped_model(), path)
    (field,) = (field for key, field in gguf.GGUFReader(path, "r+").fields.items() if key.endswith("context_length"))
    field.parts[field.data[0]][0] = 8192
    return path


def judged(package: Path, kind: str, mmproj: Path, given: Path) -> Iterator[list[object]]:
    """What is fed to an encoder, by watch, and each of it for preprocess."""
    (FOLDER / kind).mkdir(exist_ok=True)
    (FOLDER / kind / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]), encoding="utf-8")
    kept = FOLDER / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    serve = [sys.executable, HERE / "serve.py", package, text_model(), mmproj, given]
    run(sys.executable, "-m", "llamadiff", "watch", "--graphs", "1-50", "--keep", kept, "--", *serve)
    for path in sorted(kept.glob("*inp_raw.npy")):
        yield ["preprocess", FOLDER / kind, given, "--candidate", path]


def resized(package: Path) -> Iterator[list[object]]:
    """A picture that a Qwen2-VL sees."""
    path = FOLDER / "square.png"
    photograph(260, 260, seed=5).save(path)
    return judged(package, "eye", write_qwen2vl(FOLDER / "eye.gguf", EMBD), path)


def heard(package: Path) -> Iterator[list[object]]:
    """Four seconds that a Whisper's encoder hears."""
    path, sound = FOLDER / "speech.wav", tone(seconds=4.0)
    write_wav(path, [0.5 * sound + 0.05 * np.random.default_rng(3).standard_normal(len(sound))])
    return judged(package, "ear", write_hearing(FOLDER / "ear.gguf", EMBD), path)


def drafted(package: Path) -> Iterator[list[object]]:
    """The hidden states that a Qwen3.5's head takes and gives, as the server computes them."""
    model, dump, library = FOLDER / "qwen35.gguf", FOLDER / "dump", FOLDER / "dump.so"
    if not model.is_file():
        write_head_model(model)
    shutil.rmtree(dump, ignore_errors=True)
    dump.mkdir()
    run("gcc", "-shared", "-fPIC", "-D_GNU_SOURCE", f"-I{HEADERS}", HERE / "dump.c", "-o", library, "-ldl")
    beside = {"DUMP": dump, "LIB": package / "xllamacpp/xllamacpp.abi3.so", "LD_PRELOAD": library}
    words = [sys.executable, HERE / "serve.py", package, model, TOKENS]
    environment = {**os.environ, **{name: str(value) for name, value in beside.items()}}
    subprocess.run([*map(str, words)], env=environment, check=True, capture_output=True)
    save_file(head_taps(dump), FOLDER / "head.safetensors")
    yield ["heads", model, FOLDER / "head.safetensors", "--tokens", TOKENS, "--partial"]


def write_head_model(path: Path) -> None:
    """A Qwen3.5 with a head and letters for a tokenizer, without biases, of which older releases know nothing."""
    head_models.write(FOLDER)
    made = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "qwen35")
    for key, field in made.fields.items():
        if key.startswith("qwen35."):
            kind = field.types[0]
            is_list = kind == gguf.GGUFValueType.ARRAY
            value = field.contents()
            writer.add_array(key, value) if is_list else writer.add_key_value(key, value, kind)
    texts = [*LETTERS, *(f"piece{number}" for number in range(128 - len(LETTERS)))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores([0.0] * len(texts))
    writer.add_token_types([2, 3, 3] + [1] * 27 + [6] + [1] * (len(texts) - 31))
    for tensor in made.tensors:
        if ".attn_" not in tensor.name or not tensor.name.endswith(".bias"):
            writer.add_tensor(tensor.name, np.array(tensor.data))
    head_models.finish(writer)
    path.with_suffix(".new").replace(path)


def head_taps(dump: Path) -> dict[str, np.ndarray]:
    """The prompt's rows of what both graphs gave; the first two graphs are made beforehand, of nothing."""
    graphs: dict[int, dict[str, np.ndarray]] = {}
    for path in sorted(dump.iterdir()):
        number, name, columns, _ = re.fullmatch(r"(\d+) (.+) (\d+) (\d+)\.f32", path.name).groups()
        graphs.setdefault(int(number), {})[name] = np.fromfile(path, np.float32).reshape(-1, int(columns))
    found: dict[str, list[np.ndarray]] = {}
    count = len(TOKENS.split(","))
    for nodes in [graphs[number] for number in sorted(graphs)][2:]:
        state = nodes.pop("h_pre_norm", None)
        state = nodes.pop("h_nextn") if state is None else state
        kind = "h_nextn" if nodes else "trunk_h_nextn"
        if sum(map(len, found.get(kind, ()))) >= count:  # what comes next are drafts
            continue
        for name, rows in {kind: state, **nodes}.items():
            if len(rows) == len(state):
                found.setdefault(name, []).append(rows)
    return {name: np.concatenate(rows)[:count] for name, rows in found.items() if sum(map(len, rows)) >= count}


CASES = {
    "24025": Mended(drafted, "2026.5.9294", "2026.6.9538"),
    "26536": Mended(heard, "2026.7.10068", "2026.8.10566"),
    "27594": Mended(resized, "2026.8.10566", "2026.9.10809"),
}


def said(words: list[object]) -> tuple[str, str]:
    """A command's verdict, and what it says of it."""
    done = subprocess.run([sys.executable, "-m", "llamadiff", *map(str, words), "-o", "json:-"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    report = json.loads(done.stdout)
    causes = "; ".join(cause["says"] for cause in report.get("causes", ()))
    return report["verdict"], report.get("headline") or causes or report.get("where") or ""


def main() -> int:
    """Run what is asked for; print a line for each release and thing that is judged."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = False
    for number in sys.argv[1:] or CASES:
        case = CASES[number]
        for release, is_mended in ((case.before, False), (case.after, True)):
            found = [said(words) for words in case.shown(installed(release))]
            for verdict, sentence in found:
                print(f"{number}  {release:14}{verdict.upper():10} {sentence}", flush=True)
            failed = failed or any(verdict == "wrong" for verdict, _ in found) == is_mended
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
