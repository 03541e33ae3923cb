"""The keys of a projector file (clip.vision.*, clip.audio.*) against config.json and preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.lacking import same
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError
from llamadiff.trace.stated import brief, read_json

MAX_CONFIG = 1 << 22
AGAIN = "convert {file} again"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
HEADS = ("num_attention_heads", "num_heads", "encoder_attention_heads", "heads")
LAYERS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers", "n_layers", "layers")
WIDTHS = ("embed_dim", "hidden_size", "d_model", "width")  # of Qwen2-VL, hidden_size is the text model's
EPSILONS = ("layer_norm_eps", "norm_eps")
# What transformers takes where config.json states no epsilon, by model_type of the encoder.
EPSILON_OF = {
    "siglip_vision_model": 1e-6, "clip_vision_model": 1e-5, "smolvlm_vision": 1e-6, "idefics3_vision": 1e-6,
    "pixtral": 1e-5, "qwen2_vl": 1e-6, "qwen2_5_vl": 1e-6, "qwen3_vl": 1e-6, "internvl_vision": 1e-6,
    "qwen2_audio_encoder": 1e-5, "voxtral_encoder": 1e-5, "whisper": 1e-5, "gemma3": 1e-6, "qwen2_audio": 1e-5,
    "voxtral": 1e-5, "ultravox": 1e-5, "smolvlm": 1e-6, "idefics3": 1e-6, "internvl": 1e-6,
}  # fmt: skip
PROJECTOR_OF = {
    "gemma3": "gemma3", "qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger", "qwen3_vl": "qwen3vl_merger",
    "idefics3": "idefics3", "smolvlm": "idefics3", "internvl": "internvl", "internvl_chat": "internvl",
    "mistral3": "pixtral", "qwen2_audio": "qwen2a", "voxtral": "voxtral", "ultravox": "ultravox", "pixtral": "pixtral",
}  # fmt: skip
# The activation where config.json states none, by model_type of the encoder.
ACTIVATION_OF = {
    **dict.fromkeys(("siglip_vision_model", "smolvlm_vision", "idefics3_vision", "qwen3_vl"), "gelu_pytorch_tanh"),
    "clip_vision_model": "quick_gelu", "qwen2_vl": "quick_gelu", "qwen2_5_vl": "silu",
}  # fmt: skip
# What llama.cpp takes where a file does not say it (clip.cpp, load_hparams), by projector; what stands in neither
# table it wants to have.
ASSUMED: Mapping[str, Any] = {
    "use_gelu": False, "use_silu": False, "vision.projector.scale_factor": 1, "vision.spatial_merge_size": 1,
    "vision.preproc_image_size": 0, "vision.preproc_min_tiles": 0, "vision.preproc_max_tiles": 0,
    "audio.projector.stack_factor": 0,
}  # fmt: skip
ASSUMED_OF: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"vision.projector.scale_factor": 4},
    "internvl": {"vision.preproc_min_tiles": 1, "vision.preproc_max_tiles": 12},
    **{name: {"vision.spatial_merge_size": 2} for name in ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")},
}
WORDS = {
    "use_gelu": "quick GELU is computed then", "use_silu": "quick GELU is computed then",
}  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What a key should be, and where the checkpoint says so. ``certain``: converters take nothing else for it."""

    value: Any
    source: str
    certain: bool = True


def processor_config(folder: Path) -> dict[str, Any]:
    """What the files of a checkpoint's processor state, as converters read them. Raises UserError."""
    found: dict[str, Any] = {}
    for name in PROCESSORS:
        if not (folder / name).is_file():
            continue
        stated = read_json(folder / name, MAX_CONFIG, "the configuration of a processor")
        if not isinstance(stated, dict):
            raise UserError(f"{folder / name}: expected an object of a processor's settings")
        for inner in ("media_proc_cfg", "image_processor", "feature_extractor"):
            stated = {**stated, **stated[inner]} if isinstance(stated.get(inner), dict) else stated
        found |= stated
    return found


class Stated:
    """What a checkpoint's files imply for the keys of a projector file."""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], projector: str) -> None:
        inner = config.get("thinker_config")
        self.config = {**config, **inner} if isinstance(inner, dict) else config
        self.kind = str(config.get("model_type"))
        eye = str(self.part("vision")[0].get("model_type"))
        of_llava = ("pixtral" if eye == "pixtral" else "mlp") if self.kind.startswith("llava") else ""
        self.right_projector = PROJECTOR_OF.get(self.kind, of_llava)
        self.processor, self.projector = processor, self.right_projector or projector

    def part(self, name: str) -> tuple[Mapping[str, Any], str]:
        """The encoder's part of config.json, and what that is called."""
        names = ("vision_config",) if name == "vision" else ("audio_config", "whisper_config", "speech_config")
        for each in names:
            if isinstance(self.config.get(each), dict):
                return self.config[each], each
        return {}, names[0]

    def _text(self) -> Mapping[str, Any]:
        """What is said of the language model; Ultravox's own hidden_size is its projector's."""
        inner = [self.config[name] for name in ("text_config", "llm_config") if isinstance(self.config.get(name), dict)]
        return inner[0] if inner and ("hidden_size" in inner[0] or self.kind == "ultravox") else self.config

    def heads(self, name: str) -> int:
        """How many heads an encoder has; 0 if it is not said."""
        value = next((self.part(name)[0][key] for key in HEADS if key in self.part(name)[0]), 0)
        return value if isinstance(value, int) and 0 <= value < 1 << 20 else 0

    def wanted(self, name: str) -> Iterator[tuple[str, Wanted]]:
        """The keys of an encoder, ``vision`` or ``audio``."""
        part, where = self.part(name)
        kind = str(part.get("model_type", self.kind))

        def first(names: Sequence[str]) -> Wanted | None:
            key = next((key for key in names if part.get(key) is not None), None)
            return None if key is None else Wanted(_first(part[key]), f"config.json: {where}.{key}")

        for key, names in (("block_count", LAYERS), ("embedding_length", WIDTHS), ("attention.head_count", HEADS)):
            found = first(names)
            if found is not None:
                yield f"{name}.{key}", found
        epsilon = first(EPSILONS)
        usual = EPSILON_OF.get(kind, EPSILON_OF.get(self.kind))
        if epsilon is None and usual is not None:
            epsilon = Wanted(usual, "transformers' default", certain=self.projector != "idefics3")
        if epsilon is not None and not kind.startswith("qwen"):
            yield f"{name}.attention.layer_norm_epsilon", epsilon
        elif usual is not None:  # of Qwen's encoders the code says it, whatever config.json does
            yield f"{name}.attention.layer_norm_epsilon", Wanted(usual, "transformers' code")
        width = self._text().get("hidden_size")
        if width is not None:
            yield f"{name}.projection_dim", Wanted(width, "config.json: hidden_size of the text model")
        yield from self._of_eyes(part, where, kind) if name == "vision" else self._of_ears(part, where)

    def _of_eyes(self, part: Mapping[str, Any], where: str, kind: str) -> Iterator[tuple[str, Wanted]]:
        for key in ("image_size", "patch_size"):
            if part.get(key) is not None and not (key == "image_size" and self.kind.startswith("qwen")):
                yield f"vision.{key}", Wanted(_first(part[key]), f"config.json: {where}.{key}")
        count, patch = part.get("num_position_embeddings"), part.get("patch_size")
        if isinstance(count, int) and isinstance(patch, int) and 0 < count < 1 << 31:
            yield "vision.image_size", Wanted(int(count**0.5 * patch), f"config.json: {where}.num_position_embeddings")
        for key in ("image_mean", "image_std"):
            if isinstance(self.processor.get(key), list):
                yield f"vision.{key}", Wanted(self.processor[key], f"the processor's {key}")
        usual = ACTIVATION_OF.get(kind, ACTIVATION_OF.get(self.kind))
        act = part.get("hidden_act", part.get("hidden_activation", usual))
        if isinstance(act, str) and act in ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"):
            yield "use_silu", Wanted(act == "silu", f"config.json: {where}.hidden_act = {act}")
            yield "use_gelu", Wanted(act.startswith("gelu"), f"config.json: {where}.hidden_act = {act}")
        yield from self._of_projector(part, where)

    def _of_projector(self, part: Mapping[str, Any], where: str) -> Iterator[tuple[str, Wanted]]:
        merge = part.get("spatial_merge_size", self.config.get("spatial_merge_size"))
        if merge is not None:
            yield "vision.spatial_merge_size", Wanted(merge, "config.json: spatial_merge_size")
        if self.config.get("scale_factor") is not None and self.projector == "idefics3":
            yield "vision.projector.scale_factor", Wanted(self.config["scale_factor"], "config.json: scale_factor")
        ratio = self.config.get("downsample_ratio")
        if isinstance(ratio, float) and 0 < ratio <= 1:
            yield "vision.projector.scale_factor", Wanted(round(1 / ratio), "config.json: 1 / downsample_ratio")
        tokens, sizes = self.config.get("mm_tokens_per_image"), (part.get("image_size"), part.get("patch_size"))
        if self.projector == "gemma3" and all(isinstance(n, int) and 0 < n < 1 << 20 for n in (tokens, *sizes)):
            factor = sizes[0] // sizes[1] // max(1, int(tokens**0.5))  # type: ignore[operator]
            yield "vision.projector.scale_factor", Wanted(factor, "config.json: patches and mm_tokens_per_image")
        full = part.get("fullatt_block_indexes")
        if isinstance(full, list) and full and isinstance(full[0], int) and self.projector == "qwen2.5vl_merger":
            yield "vision.n_wa_pattern", Wanted(full[0] + 1, "config.json: fullatt_block_indexes[0] + 1")
        deep, depth = part.get("deepstack_visual_indexes"), part.get("depth")
        if isinstance(deep, list) and isinstance(depth, int) and 0 < depth < 1 << 16:
            wanted = [layer in deep for layer in range(depth)]
            yield "vision.is_deepstack_layers", Wanted(wanted, "config.json: deepstack_visual_indexes")
        for key, name in (("min_tiles", "min_dynamic_patch"), ("max_tiles", "max_dynamic_patch")):
            if isinstance(self.config.get(name), int) and self.config[name] > 0 and self.projector == "internvl":
                yield f"vision.preproc_{key}", Wanted(self.config[name], f"config.json: {name}")
        size = self.processor.get("size")
        if self.projector == "idefics3" and isinstance(size, dict) and isinstance(size.get("longest_edge"), int):
            yield "vision.preproc_image_size", Wanted(size["longest_edge"], "the processor's size.longest_edge")

    def _of_ears(self, part: Mapping[str, Any], where: str) -> Iterator[tuple[str, Wanted]]:
        if part.get("num_mel_bins") is not None:
            yield "audio.num_mel_bins", Wanted(part["num_mel_bins"], f"config.json: {where}.num_mel_bins")
        if self.config.get("stack_factor") is not None:
            yield "audio.projector.stack_factor", Wanted(self.config["stack_factor"], "config.json: stack_factor")
        elif self.projector == "voxtral":
            yield "audio.projector.stack_factor", Wanted(4, "transformers' code: four frames a token")


def _first(value: Any) -> Any:
    """A size of a square that is stated as its sides."""
    return value[0] if isinstance(value, list) and value and all(each == value[0] for each in value) else value


def key_oddities(model: ModelFile, stated: Stated) -> Iterator[Oddity]:
    """Keys that do not say what the checkpoint does, and lost ones for which llama.cpp takes something else."""
    fields = model.weights.fields
    kinds = [kind for kind in ("vision", "audio") if fields.get(f"clip.has_{kind}_encoder") is True]
    for kind in ("vision", "audio"):
        if kind not in kinds and any(name.startswith(f"{kind[0]}.blk.") for name in model.tensors):
            says = f"is not true in the file: llama.cpp then loads none of its {kind[0]}.* tensors; {_again(model)}"
            yield Oddity(f"clip.has_{kind}_encoder", says, "metadata")
    keys = ("clip.projector_type", *(f"clip.{kind}.projector_type" for kind in kinds))
    said, wanted_type = next((str(fields[key]) for key in keys if fields.get(key)), ""), stated.right_projector
    if wanted_type and said and said != wanted_type:
        says = f"is {said[:40]}; config.json's model_type is {stated.kind}: {wanted_type} is right"
        yield Oddity("clip.projector_type", f"{says}; {_again(model)}", "metadata")
    for kind in kinds:
        for key, wanted in stated.wanted(kind):
            for found in _of_key(model, key, wanted, stated):
                yield found if stated.right_projector else replace(found, certain=False)
    yield from _of_layers(model, kinds)


def _of_key(model: ModelFile, key: str, wanted: Wanted, stated: Stated) -> Iterator[Oddity]:
    found = model.weights.fields.get(f"clip.{key}")
    cause = "epsilon" if key.endswith("epsilon") else "metadata"
    if key.endswith("block_count") and isinstance(found, int) and isinstance(wanted.value, int):
        layer = stated.config.get("vision_feature_layer")  # layers behind the one that is read are left out
        if isinstance(layer, int) and layer < 0 and found in (wanted.value, wanted.value + layer + 1):
            return
    if found is not None:
        if not _same(found, wanted.value):
            says = f"is {_short(found)}; {wanted.source} says {_short(wanted.value)}"
            yield Oddity(f"clip.{key}", f"{says}; {_again(model)}", cause, wanted.certain)
        return
    taken = {**ASSUMED, **ASSUMED_OF.get(stated.projector, {})}.get(key)
    taken = taken if stated.right_projector or key in WORDS else None
    if key == "vision.is_deepstack_layers":  # tensors say it to llama.cpp
        return
    if taken is None:
        then = ", and llama.cpp does not do without it" if stated.right_projector else ""
        says = f"is not in the file{then}; {wanted.source} says {_short(wanted.value)}"
        yield Oddity(f"clip.{key}", f"{says}; {_again(model)}", cause)
    elif not _same(taken, wanted.value):
        why = f" ({WORDS[key]})" if key in WORDS else ""
        says = f"is not in the file: llama.cpp takes {_short(taken)}{why}; {wanted.source} says {_short(wanted.value)}"
        yield Oddity(f"clip.{key}", f"{says}; {_again(model)}", cause)


def _of_layers(model: ModelFile, kinds: Sequence[str]) -> Iterator[Oddity]:
    """That the file has other layers than it says."""
    for kind in kinds:
        count, letter = model.weights.fields.get(f"clip.{kind}.block_count"), kind[0]
        layers = {name.split(".")[2] for name in model.tensors if name.startswith(f"{letter}.blk.")}
        if isinstance(count, int) and layers and count != len(layers):
            says = f"is {count}; the file has tensors of {len(layers)} layers; {_again(model)}"
            yield Oddity(f"clip.{kind}.block_count", says, "metadata")


def _again(model: ModelFile) -> str:
    return AGAIN.format(file=model.path.name)


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return same(found, wanted)


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) <= 4:
        return "[" + ", ".join(map(_short, value)) + "]"
    return f"{value:.7g}" if isinstance(value, float) else brief(value)
