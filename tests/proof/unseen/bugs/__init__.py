"""Known mistakes as this engine would make them: by family, what each is called, and the ops that go wrong."""

from __future__ import annotations

from proof.unseen.bugs import attention, cache, ends, experts, ffn, latent, norms, products, recurrent, rope
from proof.unseen.bugs.bug import Bug

FAMILIES = (ends, norms, rope, attention, cache, products, ffn, experts, latent, recurrent)
BUGS: tuple[Bug, ...] = tuple(bug for family in FAMILIES for bug in family.BUGS)
