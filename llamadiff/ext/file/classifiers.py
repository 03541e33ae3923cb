"""How llama.cpp's graphs score what a reranker pools, by architecture: llm_graph_context::build_pooling."""

from __future__ import annotations

from llamadiff.engines.model_file import ModelFile

MEAN, FIRST, LAST = 1, 2, 3  # llama_pooling_type
_PROBABILITIES = ("qwen3", "qwen3vl")
_ENCODERS = ("modern-bert",)  # whose classifier reads the mean, and is followed by GELU


def pooled_row(file: ModelFile) -> int:
    """Which row a file's classifier reads."""
    stated = file.hyper_parameter("classifier.pooling_type")
    if stated == MEAN or (file.architecture in _ENCODERS and stated != FIRST):
        return MEAN
    return FIRST if file.architecture in _ENCODERS or file.hyper_parameter("attention.causal") is False else LAST


def gives_probability(file: ModelFile) -> bool:
    """Whether a score is a probability among labels."""
    return file.architecture in _PROBABILITIES


def is_gelu(file: ModelFile) -> bool:
    """Whether GELU follows the first product, where others have tanh."""
    return file.architecture in _ENCODERS
