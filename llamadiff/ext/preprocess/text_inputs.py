"""What a text model is given of a prompt with a picture or a sound in it: by the checkpoint, and by an engine."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.preprocess.candidate import tensors_in
from llamadiff.ext.preprocess.processor import NEEDS
from llamadiff.system import python_child
from llamadiff.system.errors import UserError
from llamadiff.system.stale_files import temporary_directory
from llamadiff.system.started import kill, start
from llamadiff.trace.stated import reason

Array = NDArray[Any]
MOST = 1 << 28  # values of an array
MOST_ROWS = 1 << 13  # of which all pairs are looked at
EMBEDS = ("inputs_embeds", "embeddings", "inp_embd", "embeds")
IDS = ("input_ids", "ids", "tokens", "inp_tokens")
POSITIONS = ("position_ids", "positions", "inp_pos")
MASKS = ("attention_mask", "mask", "attn_inp_kq_mask", "self_kq_mask")
FEATURES = ("image_features", "audio_features", "features", "encoder_output")
_PART = re.compile(r"(?P<graph>[0-9]{1,9})-(?P<name>inp_tokens|inp_embd|inp_pos|mask|encoder_output)\.npy")
HIDDEN = -1e4  # what is added to a score that is not to be seen, at most


@dataclass(frozen=True)
class RightInputs:
    """What the checkpoint's code gives its text model, a row for each position.

    ``embeds``: [row, value]; ``is_media``: the rows of pictures or sounds; ``positions``: [section, row]; ``masks``:
    which rows each row sees, [row, row], by the kind of layer. ``placeholder``: the embedding of the token that stands
    for a row, ``word``: that token; ``texts``: of all tokens; ``scale``: of text embeddings; ``model``: its class.
    """

    ids: Array
    embeds: Array
    is_media: Array
    positions: Array
    masks: Mapping[str, Array]
    placeholder: Array
    texts: Sequence[str]
    scale: float
    model: str
    word: str

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.ids)


@dataclass(frozen=True)
class GivenInputs:
    """What an engine gave its text model, as far as it says so.

    ``ids``: -1 where no token is known; ``embeds``: [row, value], NaN where only the token is known; ``features``: what
    the engine's own encoder gave, [row, value]. ``goes_on``: what was generated may follow.
    """

    ids: Array | None = None
    embeds: Array | None = None
    positions: Array | None = None
    mask: Array | None = None
    features: Array | None = None
    goes_on: bool = False

    def cut(self, count: int) -> GivenInputs:
        """The first so many rows."""

        def some(values: Array | None) -> Array | None:
            return None if values is None else values[:count]

        return replace(
            self, ids=some(self.ids), embeds=some(self.embeds), goes_on=False,
            positions=None if self.positions is None else self.positions[:, :count],
            mask=None if self.mask is None else self.mask[:count, :count],
        )  # fmt: skip

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(next(each for each in (self.embeds, self.ids) if each is not None))


def right_inputs(checkpoint: Path, file: Path, prompt: str) -> RightInputs:
    """What the checkpoint's own code gives its text model. Raises UserError."""
    if any(find_spec(name) is None for name in ("torch", "transformers", "PIL")):
        raise UserError(NEEDS)
    if not (checkpoint / "config.json").is_file():
        raise UserError(f"{checkpoint}: is no directory of a checkpoint; --prompt needs its config.json and weights")
    if not file.is_file():
        raise UserError(f"{file}: no such file; give the picture or the .wav file that the engine was given")
    with temporary_directory() as folder:
        to = folder / "inputs.npz"
        process = start(
            python_child.command(
                "llamadiff.ext.preprocess.text_inputs_child", str(checkpoint), str(file), prompt, str(to)
            ),
            kill, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
        )  # fmt: skip
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise UserError(f"the checkpoint's process {python_child.how_it_ended(process.wait())}")
            about = json.loads(line)
            if "error" in about:
                raise UserError(f"{checkpoint}: transformers cannot run it to its text model ({about['error']})")
            with np.load(to, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files}
        finally:
            kill(process)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
    masks = {name.removeprefix("mask "): each for name, each in arrays.items() if name.startswith("mask ")}
    positions = arrays.get("positions", np.arange(len(arrays["ids"]))[None])
    positions = positions[1:] if len(positions) == 4 else positions  # the first are those of text, for masks
    return RightInputs(
        arrays["ids"], arrays["embeds"], arrays["is_media"].astype(bool), positions, masks,
        arrays["placeholder"], about["texts"], about["scale"], about["class"], about["placeholder"],
    )  # fmt: skip


def dumped_inputs(path: Path) -> GivenInputs:
    """What an engine gave its text model: a file of arrays, or a folder of ``watch --keep``. Raises UserError."""
    if not path.exists():
        raise UserError(f"{path}: no such file; write inputs_embeds, position_ids and attention_mask with np.savez")
    try:
        found = _of_watch(path) if path.is_dir() else _of_file(path)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path}: its arrays do not fit together ({reason(error)}); write them anew") from None
    if found.embeds is None and found.ids is None:
        raise UserError(
            f"{path}: has none of {', '.join(EMBEDS)}; write what the text model is given of each position, "
            "[row, value], with np.savez"
        )
    if not 0 < found.count <= MOST_ROWS:
        raise UserError(f"{path}: has {found.count} rows; from 1 to {MOST_ROWS} are looked at: give a shorter prompt")
    return found


def _of_file(path: Path) -> GivenInputs:
    arrays = tensors_in(path, MOST)
    if len(arrays) == 1 and next(iter(arrays.values())).ndim >= 2:
        arrays = {EMBEDS[0]: next(iter(arrays.values()))}

    def one(names: Sequence[str]) -> Array | None:
        return next((arrays[name] for name in names if name in arrays), None)

    embeds, ids = one(EMBEDS), one(IDS)
    embeds = None if embeds is None else _rows(path, embeds)
    ids = None if ids is None else np.asarray(ids).reshape(-1).astype(np.int64)
    count = len(embeds) if embeds is not None else len(ids) if ids is not None else 0
    if ids is not None and len(ids) != count:
        ids = None  # of the prompt before pictures were put in
    features = one(FEATURES)
    return GivenInputs(
        ids, embeds, _positions(one(POSITIONS), count), _mask(one(MASKS), count),
        None if features is None else _rows(path, features),
    )  # fmt: skip


def _rows(path: Path, values: Array) -> Array:
    if values.ndim < 2:
        raise UserError(f"{path}: the embeddings have the shape {list(values.shape)}; write [row, value]")
    return np.asarray(values, np.float32).reshape(-1, values.shape[-1])


def _positions(values: Array | None, count: int) -> Array | None:
    """[section, row]; of ggml's four sections the last is always 0, of transformers' the first is the text's."""
    if values is None or not count or values.size % count:
        return None
    values = np.asarray(values, np.float64).reshape(-1, count)
    if len(values) == 4:
        return values[:3] if not values[3].any() else values[1:]
    return values


def _mask(values: Array | None, count: int) -> Array | None:
    """Whether each row sees each: of booleans, numbers that are added, or ones and zeros."""
    if values is None or count > MOST_ROWS or values.ndim < 2 or values.shape[-2] < count or values.shape[-1] < count:
        return None
    square = values.reshape(-1, *values.shape[-2:])[0][:count, :count]
    if square.dtype != bool:
        sums = np.asarray(square, np.float64)
        square = sums > HIDDEN if (sums <= 0).all() else sums != 0
    return np.asarray(square, bool)


def _of_watch(path: Path) -> GivenInputs:
    """The decodes of a prompt one after the other, as far as they are kept: tokens, rows, positions, masks."""
    parts: dict[int, dict[str, Array]] = {}
    for file in sorted(path.iterdir()):
        match = _PART.fullmatch(file.name)
        if match is not None and file.stat().st_size <= 8 * MOST:
            parts.setdefault(int(match["graph"]), {})[match["name"]] = np.load(file, allow_pickle=False)
    passes = [parts[number] for number in sorted(parts) if {"inp_tokens", "inp_embd"} & parts[number].keys()]
    outputs = [parts[number]["encoder_output"] for number in sorted(parts) if "encoder_output" in parts[number]]
    if not any("inp_embd" in each for each in passes):
        raise UserError(
            f"{path}: holds no decode of embeddings; run llamadiff watch --keep {path} --every 1 -- llama-mtmd-cli ..."
        )
    first = next(n for n, each in enumerate(passes) if "inp_embd" in each)
    starts = [n for n, each in enumerate(passes[: first + 1]) if "inp_pos" in each and not each["inp_pos"].flat[0]]
    passes = passes[starts[-1] if starts else 0 :]  # what was before is another context's, or a warm-up
    width = next(each["inp_embd"].shape[-1] for each in passes if "inp_embd" in each)
    counts = [len(each["inp_embd"].reshape(-1, width)) if "inp_embd" in each else each["inp_tokens"].size
              for each in passes]  # fmt: skip
    total = sum(counts)
    ids, embeds = np.full(total, -1, np.int64), np.full((total, width), np.nan, np.float32)
    sections = max((each["inp_pos"].size // n for each, n in zip(passes, counts, strict=True) if "inp_pos" in each),
                   default=0)  # fmt: skip
    positions, mask = np.zeros((max(sections, 1), total)), np.zeros((min(total, MOST_ROWS),) * 2, bool)
    start, has_mask = 0, all("mask" in each for each in passes)
    for each, count in zip(passes, counts, strict=True):
        here = slice(start, start + count)
        if "inp_embd" in each:
            embeds[here] = each["inp_embd"].reshape(-1, width)
        else:
            ids[here] = each["inp_tokens"].reshape(-1)
        if "inp_pos" in each:
            positions[:, here] = np.resize(each["inp_pos"].reshape(-1, count), (max(sections, 1), count))
        if has_mask and total <= MOST_ROWS:
            rows = each["mask"].reshape(-1, each["mask"].shape[-1])[:count, :total]
            mask[here, : rows.shape[1]] = np.asarray(rows, np.float64) > HIDDEN
        start += count
    known = [*_last_outputs(outputs, width, int((ids < 0).sum()))]
    return GivenInputs(
        ids, embeds, _positions(positions, total) if sections else None,
        mask if has_mask and total <= MOST_ROWS else None, np.concatenate(known) if known else None, goes_on=True,
    )  # fmt: skip


def _last_outputs(outputs: Sequence[Array], width: int, count: int) -> Sequence[Array]:
    """What the encoder gave, [row, value], as many of its last graphs as the rows may come from."""
    found: list[Array] = []
    for each in reversed(outputs):
        if sum(map(len, found)) < count and each.shape and each.shape[-1] == width:
            found.insert(0, each.reshape(-1, width))
    return found
