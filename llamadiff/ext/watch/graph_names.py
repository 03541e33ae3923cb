"""What a watched graph is called: the part of a model that it computes, as its tensors' names tell it."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable

# The part that a graph is, if so many of its weights' names begin so: llama.cpp's own and its clip's, whisper.cpp's,
# stable-diffusion.cpp's. The first of equal counts.
_PARTS = tuple((part, re.compile(pattern)) for part, pattern in (
    ("vision", r"(v|mm|resampler|model\.vision_model|vision_model)\."),
    ("audio", r"(a|mm\.a)\."),
    ("text", r"(blk\.\d+|token_embd|output|output_norm|rope_freqs)\b"),
    ("encoder", r"(enc\.|encoder\.)"),
    ("decoder", r"(dec\.|decoder\.)"),
    ("VAE", r"(first_stage_model|vae|decoder\.up|encoder\.down|tae)\b"),
    ("UNet", r"model\.diffusion_model\.(input_blocks|middle_block|output_blocks|time_embed|out)\b"),
    ("diffusion transformer", r"model\.diffusion_model\.(joint_blocks|double_blocks|single_blocks|x_embedder)\b"),
    ("text encoder", r"(cond_stage_model|conditioner|text_model|text_encoders|te\d?)\b"),
))  # fmt: skip
_NODES = tuple((part, re.compile(pattern)) for part, pattern in (  # by what it computes and reads, where no weight says
    ("cache", r"cache_[kv]"),
    ("encoder", r"(mel|embd_conv)\b"),
    ("cross-attention", r"embd_enc\b"),
    ("decoder", r"(KQ_mask|position)\b"),
    ("upscaler", r"ggml_runner_cut:esrgan\b"),
    ("UNet", r"ggml_runner_cut:unet\b"),
    ("VAE", r"(ggml_runner_cut:(wan_)?vae\b|bench-(start|end)$)"),
    ("text encoder", r"ggml_runner_cut:(clip_text|t5|llm\.text)\b"),
    ("vision", r"ggml_runner_cut:(clip_vision|llm\.vision)\b"),
    ("diffusion transformer", r"ggml_runner_cut:"),
))  # fmt: skip
OTHER, CACHE = "graph", "cache"


def part_of(weights: Collection[str], nodes: Iterable[str], fills: bool = False) -> str:
    """The part of a model with these weights and nodes; ``fills``: all that comes of it is copied into a memory."""
    counts = [(sum(bool(form.match(name)) for name in weights), part) for part, form in _PARTS]
    most, part = max(counts, key=lambda count: count[0])
    if most:
        return part
    known = [*nodes]
    other = CACHE if fills else OTHER
    return next((part for part, form in _NODES if any(map(form.match, known))), other)


class GraphNames:
    """Names of graphs: of such as are the same part and share no weight, the second has a number behind it."""

    def __init__(self) -> None:
        self._models: dict[Hashable, str] = {}  # weight -> what graphs that read it are called
        self._counts = dict[str, int]()

    def name(
        self, read: Collection[Hashable], weights: Collection[str], nodes: Iterable[str], fills: bool = False
    ) -> str:
        """What a graph is called that has ``read`` these weights, of these names."""
        part = part_of(weights, nodes, fills)
        known = next((name for key in read if (name := self._models.get((part, key)))), None)
        if known is None:
            number = self._counts[part] = self._counts.get(part, 0) + 1 if read else 1
            known = part if number == 1 else f"{part} {number}"
        self._models.update({(part, key): known for key in read})
        return known
