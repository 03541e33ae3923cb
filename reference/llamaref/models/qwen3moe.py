"""qwen3moe: Qwen 3 mixtures of experts. Qwen 3's block with experts as in Mixtral."""

from functools import partial

from llamaref.models import qwen3
from llamaref.models.llama import moe

TRAITS = qwen3.TRAITS
layer = partial(qwen3.layer, ffn=moe)
