"""Names of tensors that no tap has but another library uses, and what to do with them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

from llamadiff.candidates.map_file import BUILT_IN
from llamadiff.trace import taps

_LIBRARIES = {"hf": "Hugging Face's modules", "transformer-lens": "TransformerLens' hooks"}
MOST = 10_000  # names that are looked at
LOGITS = "logits"  # what anybody calls them


def advice_on_names(names: Iterable[str]) -> str | None:
    """What to do about names that no tap has, but that another library uses; None if none is known to."""
    known = list(islice(names, MOST))
    if any(name.startswith("model.") and name.endswith(".weight") for name in known):
        return "these are a model's weights, not what it computed; --candidate transformers:DIR runs a checkpoint"
    if known == [LOGITS]:
        return f"the logits are called {taps.LOGITS}"
    found = {library: len([name for name in known if _pattern(library).fullmatch(name)]) for library in _LIBRARIES}
    best = max(found, key=lambda library: found[library])
    return f"these are the names of {_LIBRARIES[best]}: add --map {best}" if found[best] else None


def _pattern(library: str) -> re.Pattern[str]:
    names = (re.escape(entry.name).replace(re.escape("{i}"), "[0-9]{1,4}") for entry in BUILT_IN[library].values())
    return re.compile("|".join(names))
