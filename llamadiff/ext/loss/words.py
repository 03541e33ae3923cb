"""What is said of two files: what the types cost, whether that is usual, which tensors it is, whether one is off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from llamadiff.ext.loss.result import OWN, SOURCE, Estimate, Loss, Restored, named
from llamadiff.report.terminal.escape import tiny
from llamadiff.result.rows import Row

_FRACTIONS = (
    (0.95, "nearly all"), (0.71, "three quarters"), (0.585, "two thirds"), (0.42, "half"), (0.29, "a third"),
    (0.225, "a quarter"), (0.175, "a fifth"), (0.0, "a tenth"),
)  # fmt: skip
EQUAL, _SMALL = 1e-12, 1e-4  # nats: none at all, and too few to be written out
_NAMED = 3
_SURE = 2.0  # standard errors by which a loss is seen to be larger than another


def sentence(loss: Loss, code_is_right: bool) -> str:
    """The finding in a line; first of all where the files seem to be swapped."""
    swapped = sum(one.more for one in loss.contributions) < 0
    before = "the second file has more bits than the first: give the better file first; " if swapped else ""
    return f"{before}{_finding(loss, code_is_right)}"


def _finding(loss: Loss, code_is_right: bool) -> str:
    if loss.damaged:
        return _damage(loss)
    if loss.kl.value <= EQUAL:
        return f"both files give the same next tokens: {loss.kind} costs nothing here"
    parts = [f"{loss.kind} costs {told(loss.kl)}{_usual(loss)}", *_named(loss)]
    if code_is_right:
        parts.append("nothing points to a bug" if loss.is_usual else "each tensor is as near as its type allows")
    return "; ".join(parts)


def of_vectors(kind: str, architecture: str, last: Row | None) -> str:
    """The finding of an encoder; ``last``: the last values that both files have."""
    none = f"{architecture} is an encoder: there are no next tokens, and no KL"
    if last is None or last.drift is None:
        return none
    if last.drift.nmse == 0:
        return f"both files give the same vectors ({last.tap}): {kind} costs nothing here; {none}"
    return f"{kind} moves the vectors ({last.tap}) by an NMSE of {tiny(last.drift.nmse)}; {none}"


def clauses(loss: Loss) -> Iterator[str]:
    """What stands under it."""
    where = f"of {loss.windows} windows of {loss.window} tokens of {loss.text}" if loss.text else "of the prompt"
    same = named(loss.statistics, "Same top p")
    first = f", at {100 * same.value:.0f}% of which the first token is the same" if same is not None else ""
    yield f"over {loss.positions} positions {where}{first}"
    if loss.honest is not None:
        yield f"the good file quantized to the same types here and now costs {told(loss.honest)}"
    if loss.published is not None:
        low, high = loss.published
        span = f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
        yield f"for {loss.kind} llama.cpp's own table has KL {span} of models of 7 and 8 billion weights ({SOURCE})"
    if loss.spent is not None:
        yield spent(loss.spent)


def spent(found: Restored) -> str:
    """What a budget buys."""
    if not found.changes:
        return "the budget is too small for any tensor"
    count = len(found.changes)
    what = "1 tensor" if count == 1 else f"{count} tensors"
    return (
        f"{found.more:,} bytes more, spent on {what}, leave {told(found.measured)} "
        f"(KL {tidy(found.predicted)} was predicted)"
    )


def told(estimate: Estimate) -> str:
    """``KL 0.031 +- 0.002``."""
    if math.isnan(estimate.error):
        return f"KL {tidy(estimate.value)}"
    if estimate.value < _SMALL:
        return f"KL {estimate.value:.2g} +- {estimate.error:.1g}"
    digits = max(0, 1 - math.floor(math.log10(estimate.error))) if estimate.error > 0 else 6
    return f"KL {estimate.value:.{min(digits, 7)}f} +- {estimate.error:.{min(digits, 7)}f}"


def tidy(value: float) -> str:
    """A number of nats, in two or three digits."""
    return f"{value:.2g}" if value < 0.01 else f"{value:.3f}"


def _usual(loss: Loss) -> str:
    if loss.is_usual and (loss.honest is not None or loss.published is not None):
        return ", usual for the type"
    if loss.honest is not None and loss.honest.value > 0:
        is_sure = loss.kl.value - loss.honest.value > _SURE * loss.kl.error
        unsure = "" if is_sure else ", within the error of so few positions"
        return f", {loss.kl.value / loss.honest.value:.1f} times what quantizing the good file to it costs{unsure}"
    if loss.published is not None and not loss.is_usual:
        return ", more than is published for the type"
    return ""


def _named(loss: Loss) -> Iterator[str]:
    """How much of it the tensors are that cost most."""
    if loss.restored is not None:
        yield f"{share(loss.restored)} of it is {_listed([short(name) for name in loss.restored.changes])}"
    elif loss.contributions and math.isnan(loss.weighed.error):
        yield f"which tensors it is cannot be told from {loss.positions} positions"
    elif loss.contributions:
        yield "no single tensor is surely a tenth of it"


def share(restored: Restored) -> str:
    """A part of the loss in words."""
    return next((words for least, words in _FRACTIONS if restored.share >= least), "little")


def _damage(loss: Loss) -> str:
    """Tensors that no honest quantization would have made."""
    names = [short(name) for name in loss.damaged[:_NAMED]]
    more = f" and {len(loss.damaged) - _NAMED} more" if len(loss.damaged) > _NAMED else ""
    verb = "is" if len(loss.damaged) == 1 else "are"
    said = f"{_listed(names)}{more} {verb} damaged: no honest {loss.kind}"
    if loss.restored is None or math.isnan(loss.kl.value):
        return said
    them = "it" if verb == "is" else "them"
    return f"{said}; of {told(loss.weighed)}, restoring {them} leaves {told(loss.restored.measured)}"


def short(name: str) -> str:
    """A weight's name as people say it."""
    return name.removesuffix(".weight")


def _listed(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def chosen(loss: Loss) -> list[tuple[str, str]]:
    """The tensors that a budget is spent on, each with the type that it gets."""
    own = {one.name: one.good for one in loss.contributions}
    changes = loss.spent.changes if loss.spent is not None else {}
    return [(name, kind if kind != OWN else own.get(name, "")) for name, kind in changes.items()]
