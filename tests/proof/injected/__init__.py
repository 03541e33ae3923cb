"""Known mistakes, each as somebody's engine would make it: edits of the strangers' engine (proof/strangers)."""

from __future__ import annotations

from proof.injected import attention, cache, embedding, ffn, latent, norms, products, recurrent, rope, rounding
from proof.injected.base import Injection

MODULES = (embedding, norms, products, rope, attention, ffn, rounding, cache, latent, recurrent)
ALL: tuple[Injection, ...] = tuple(injection for module in MODULES for injection in module.INJECTIONS)
INJECTIONS = tuple(injection for injection in ALL if injection.models)  # of architectures of the reference engine
BUGS = {injection.name: injection for injection in INJECTIONS if not (injection.harmless or injection.choice)}
IN_OTHERS = {injection.name: injection for injection in ALL if injection.others}  # of those of llama.cpp's graph
