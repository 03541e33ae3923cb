"""Where the threads are that known bugs come from."""

from __future__ import annotations

# Of the repositories that known bugs name without their owner, those that have one meaning.
_OWNERS = {
    "llama.cpp": "ggml-org", "TinyLlama": "jzhang38", "candle": "huggingface", "transformers": "huggingface",
    "vllm": "vllm-project", "sglang": "sgl-project", "mlx-lm": "ml-explore", "mlx-vlm": "Blaizzy",
    "onnxruntime-genai": "microsoft", "ollama": "ollama",
}  # fmt: skip


def page_of(source: str) -> str | None:
    """The page of a thread such as ``llama.cpp#22611``; None where its owner is not known."""
    name, _, number = source.partition("#")
    if name not in _OWNERS or not number.isdecimal():
        return None
    return f"https://github.com/{_OWNERS[name]}/{name}/issues/{number}"
