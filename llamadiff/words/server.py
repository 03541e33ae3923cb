"""What is said of a server: which token ids, settings or file it has, and how much of it was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamadiff.engines.model_file import ModelFile
from llamadiff.judge.preflight.checks import Check, tokens_apart
from llamadiff.numerics import tolerances
from llamadiff.result.comparison import Comparison

RIGHT = (tolerances.MATCH, tolerances.NOISE)
COARSE = ("q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")  # types of a cache that cost more than rounding does


@dataclass(frozen=True)
class Found:
    """What explains a server's answers: ``says`` of it in a sentence, and how to mend it.

    ``spec``: the settings of llama.cpp that it runs with, which are no mistake; ``check``: what fails before any layer.
    """

    says: str
    fix: str = ""
    spec: str = ""
    check: str = ""

    @property
    def is_right(self) -> bool:
        return bool(self.spec)


def other_ids(file: ModelFile, right: Sequence[int], stated: Sequence[int]) -> Found:
    """Token ids that the server itself says a prompt has, and are not the file's."""
    how = tokens_apart(file, right, stated).removeprefix("the candidate ran other tokens: ")
    says = f"the server has other token ids for the prompt: {how.replace('the candidate', 'the server')}"
    return Found(says, _FIX, check="tokens")


def tried_ids(what: str, right: Sequence[int], ids: Sequence[int]) -> Found:
    """Token ids that the server does not state, and must have: the right engine says on them what the server said."""
    says = (
        f"the server {what}: on those {len(ids)} token ids the right log-probabilities are the server's, on the file's "
        f"{len(right)} they are not"
    )
    return Found(says, _FIX, check="tokens")


_FIX = (
    "mend the token ids first: llamadiff tokens MODEL --candidate URL tries many texts, where the server has /tokenize"
)


def with_settings(spec: str) -> Found:
    """Settings under which llama.cpp has the server's log-probabilities."""
    coarse = any(each in spec for each in COARSE)
    more = "; such a cache is coarse, and the server's own choice" if coarse else ""
    return Found(f"the server's are llama.cpp's with {spec}{more}", spec=spec)


def of_another_file(found: str, own: str) -> Found:
    """Another file of the model, of which llama.cpp has the server's log-probabilities."""
    return Found(f"the server does not run {own}: its log-probabilities are those of {found}, which lies beside it",
                 f"start the server with {own}, or compare it with {found}", check="file")  # fmt: skip


def shown(most: int, rows: int, tokens: int) -> str:
    """How far an answer goes that rests on some log-probabilities."""
    of = "the one position" if rows == 1 else f"each of {rows} positions"
    return f"as far as {most} log-probabilities of {of} show" + (f" (of {tokens} tokens)" if rows < tokens else "")


def told(result: Comparison, found: Found | None, seen: str) -> Comparison:
    """A judgement of what a server said, under what explains it."""
    if found is not None and not found.is_right:
        check = Check(found.check, tolerances.WRONG, found.says)
        return replace(
            result, verdict=tolerances.WRONG, headline=found.says, proof=(seen, *result.proof),
            preflight=(*(each for each in result.preflight if each.name != found.check), check),
            next_steps=(found.fix,), rows=() if found.check == "file" else result.rows,
        )  # fmt: skip
    clauses = (found.says,) if found is not None else ()
    if result.verdict in RIGHT:
        headline = f"the server's log-probabilities are right up to rounding, {seen}"
        return replace(result, headline=headline, proof=(*clauses, *result.proof))
    return replace(result, proof=(*clauses, seen, *result.proof))
