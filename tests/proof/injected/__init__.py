"""Known mistakes, each as somebody's engine would make it."""

from __future__ import annotations

from proof.injected import attention, cache, embedding, ffn, norms, products, rope, rounding

MODULES = (embedding, norms, products, rope, attention, cache, ffn, rounding)
INJECTIONS = tuple(injection for module in MODULES for injection in module.INJECTIONS)
