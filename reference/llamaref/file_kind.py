"""What a GGUF file holds where it is no model: asked before anything else of it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from llamaref.errors import ModelError


@dataclass(frozen=True)
class OtherKind:
    """A kind of file that nobody runs by itself: its ``name``, and what to do with one."""

    name: str
    use: str


ADAPTER = OtherKind(
    "a LoRA adapter",
    "give its model, with --llama-cpp lora=FILE; llamadiff weights FILE MODEL says whether it fits",
)
CONTROL_VECTOR = OtherKind(
    "a control vector", "give the model that it is for; llamadiff weights FILE looks at it alone"
)
PROJECTOR = OtherKind(
    "a multimodal projector (mmproj)",
    "give the language model that it is for; llamadiff weights FILE CHECKPOINT says whether it was converted rightly, "
    "llamadiff watch -- llama-mtmd-cli ... judges what an encoder computes",
)
VOCABULARY = OtherKind("a vocabulary alone", "llamadiff tokens FILE and llamadiff template FILE ask about it")
IMPORTANCE = OtherKind(
    "an importance matrix", "give the model that it was measured on; llama-quantize --imatrix FILE reads it"
)
_BY_TYPE = {"adapter": ADAPTER, "mmproj": PROJECTOR, "imatrix": IMPORTANCE, "vocab": VOCABULARY}
_BY_ARCHITECTURE = {"clip": PROJECTOR, "controlvector": CONTROL_VECTOR, "imatrix": IMPORTANCE}


def other_kind(fields: Mapping[str, Any], tensors: Collection[str]) -> OtherKind | None:
    """What a file holds by its metadata and the names of its tensors; None for a model."""
    said, architecture = fields.get("general.type"), fields.get("general.architecture")
    found = _BY_TYPE.get(said) if isinstance(said, str) else None
    found = found or (_BY_ARCHITECTURE.get(architecture) if isinstance(architecture, str) else None)
    if found is ADAPTER and fields.get("adapter.type") == "control_vector":
        return CONTROL_VECTOR
    if found is None and any(name.endswith((".lora_a", ".lora_b")) for name in tensors):
        return ADAPTER
    if found is None and not tensors and "tokenizer.ggml.tokens" in fields:
        return VOCABULARY
    return found


def check_is_model(fields: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Raise ModelError for a file that holds something else."""
    kind = other_kind(fields, tensors)
    if kind is not None:
        raise ModelError(f"holds {kind.name} and no model that can be run; {kind.use}")
