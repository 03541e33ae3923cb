"""What is said of a server: which token ids, settings or file it has, and how much of it was seen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamadiff.ext.server.history import HOWS
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import UNCHECKED, is_right, of_answers, of_check
from llamadiff.result.comparison import Comparison
from llamadiff.result.message import Message

COARSE = ("q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")  # types of a cache that cost more than rounding does


@dataclass(frozen=True)
class Found:
    """What explains a server's answers: ``says`` of it in a sentence, and how to mend it.

    ``is_right``: it is no mistake; ``spec``: the settings of llama.cpp that it runs with. ``check``: what fails before
    any layer.
    """

    says: str
    fix: str = ""
    spec: str = ""
    check: str = ""
    is_right: bool = False


def other_ids(what: str, apart: str) -> Found:
    """Token ids that the server says a prompt has, and are not the file's; ``what`` it does, and where they part."""
    return Found(f"the server {what}: {apart}", MEND, check="tokens")


def tried_ids(what: str, right: Sequence[int], ids: Sequence[int], count: int | None) -> Found:
    """Token ids that the server does not state, and must have: after them llama.cpp says what the server said."""
    says = f"the server {what}: after those {len(ids)} token ids llama.cpp says what the server says"
    return Found(says + _counted(right, count), MEND, check="tokens")


def unknown_ids(right: Sequence[int], count: int | None) -> Found:
    """Token ids that the server neither states nor has of a known mistake: after the text it goes on otherwise."""
    says = "the server has other token ids for the prompt: after the text it does not say what it says after the file's"
    return Found(says + _counted(right, count), MEND, check="tokens")


def _counted(right: Sequence[int], count: int | None) -> str:
    if count is None or count == len(right):
        return ""
    return f", and it counts {count} tokens, where the file has {len(right)}"


MEND = (
    "mend the token ids first; llamadiff tokens MODEL --candidate URL tries many texts, where the server has /tokenize"
)


def with_settings(spec: str) -> Found:
    """Settings under which llama.cpp has the server's log-probabilities."""
    return Found(f"they are llama.cpp's with {spec}", spec=spec, is_right=True)


def as_near_as_ways(apart: float, ways: float) -> Found:
    """Log-probabilities no further from llama.cpp's than a few times what its right ways are from one another."""
    says = (
        f"they are off llama.cpp's by an NMSE of {apart:.1e}, where its own ways of rounding (a cache of 16 or 8 bits, "
        f"flash attention) differ by {ways:.1e}"
    )
    return Found(says, is_right=True)


def after_temperature(value: float) -> Found:
    """Log-probabilities that a server gives after temperature."""
    says = f"the server gives log-probabilities after temperature {value:.4g}"
    return Found(says, "have it give those of the model, or ask it with temperature 1", check="log-probabilities")


def other_rope(name: str, value: float, own: float) -> Found:
    """RoPE's base, or the scale of positions, that the server must have, and the file's ``own``."""
    if name == "rope_base":
        says, options = f"the server uses RoPE's base {value:.6g}; the file says {own:.6g}", "--rope-freq-base"
    else:
        says = f"the server multiplies positions by {value:.4g} for RoPE; the file by {own:.4g}"
        options = "--rope-scaling, --rope-scale and --rope-freq-scale"
    return Found(says, f"look for it among the server's options: {options}", check="RoPE")


def dropped(kept: int, first: int, last: int) -> Found:
    """A prompt of which the server runs a part."""
    before = f"after the first {kept} " if kept > 1 else "after the first one " if kept else ""
    says = (
        f"the server drops {first - kept} of the prompt's tokens {before}and runs the last {last - first} of {last}: "
        "its context is cut or shifted"
    )
    return Found(says, "give the server a larger context, or turn its context shift off", check="context")


def left_out(token: int, text: str, size: int, above: float) -> Found:
    """A token that a server does not name where it should be among the first."""
    says = (
        f"the server leaves out token {token} {text!r} after {size} tokens, though its log-probability is {above:.2g} "
        "above the last one that it names"
    )
    return Found(says, "look for a bias, a grammar or a filter on its tokens", check="filter")


def of_another_file(found: str, own: str) -> Found:
    """Another file of the model, of which llama.cpp has the server's log-probabilities."""
    return Found(f"the server does not run {own}: its log-probabilities are those of {found}, which lies beside it",
                 f"start the server with {own}, or compare it with {found}", check="file")  # fmt: skip


def in_another_type(kind: str) -> Found:
    """The file's weights, in a coarser type."""
    return Found(f"the server does not run this file: its log-probabilities are those of its weights in {kind}",
                 "start the server with this file, or compare it with the one that it runs", check="file")  # fmt: skip


def shown(most: int, rows: int, tokens: int) -> str:
    """How far an answer goes that rests on some log-probabilities."""
    of = "the one position" if rows == 1 else f"each of {rows} positions"
    return f"as far as {most} log-probabilities of {of} show" + (f" (of {tokens} tokens)" if rows < tokens else "")


def asked_of_its_past(hows: Sequence[str], unasked: str) -> str:
    """What was asked after other requests and beside them, and is right; what was not, and why."""
    asked = [*dict.fromkeys(hows)]
    says = f"asked {', '.join(asked)}: it says the same" if asked else ""
    left = f"was not asked {', '.join(how for how in HOWS if how not in asked)}: {unasked}" if unasked else ""
    return "; it ".join(filter(None, [says, left])) if says else f"it {left}" if left else ""


def of_its_past(how: str, size: int, tokens: int, apart: tuple[float, float], cause: str) -> Found:
    """An answer that depends on other requests: after ``size`` of a probe's tokens; how far it is off, and may be."""
    where = f" (after {size} of {tokens} tokens)" if size < tokens else ""
    says = (
        f"the server's answers depend on what else it is asked: asked {how}{where} it is off by an NMSE of "
        f"{apart[0]:.1e}, where {apart[1]:.1e} is rounding, and asked in order it is right"
    )
    return Found(f"{says}: {cause}" if cause else says, KEEPS, check="cache")


KEEPS = (
    "look at what it keeps of earlier requests: compare token ids, drop all that follows the last one that agrees (of "
    "rejected drafts, too), and give each request a cache of its own"
)


def explain_server_verdict(result: Comparison, found: Found | None, seen: str, past: str = "") -> Comparison:
    """A judgement of what a server said, under what explains it; nothing is said of taps, which no server has.

    ``past``: what it was asked after other requests, where that is right.
    """
    result = replace(result, missing=())
    if found is not None and not found.is_right:
        check = Check(found.check, of_check(found), found.says)
        kept = tuple(each for each in result.preflight if each.name != found.check)
        if found.check == "tokens" and is_right(result.verdict):
            seen = f"asked with the file's own ids it is right up to rounding, {seen}"
        result = result.overrule(
            of_answers(result.verdict, found.says, True), Message(found.says, (seen, *result.proof))
        )
        return replace(result, preflight=(*kept, check), next_steps=(found.fix,))
    if found is None and not is_right(result.verdict):
        headline = _of_its_engine(result.headline)
        known = any(each.known for each in result.diagnosis)
        if not known:
            coarse = ", as much as coarse rounding leaves" if result.verdict == UNCHECKED else ""
            headline = (
                f"the server's log-probabilities are off{coarse}; no known mistake, setting or file explains them"
            )
        return replace(result, headline=headline, proof=(seen, *result.proof), next_steps=() if known else (BY_TAPS,))
    headline, proof = "the server's log-probabilities are right up to rounding", result.proof
    if found is not None:
        cache = ", with a coarse cache" if any(each in found.spec for each in COARSE) else ""
        headline, proof = headline + cache, (found.says, *proof)
        if not is_right(result.verdict):  # what rounding in such a cache may leave, and what it leaves in llama.cpp
            proof = (found.says, *(f"so much rounding leaves an NMSE of {row.local.nmse:.1e}" for row in result.rows
                                   if row.local is not None))  # fmt: skip
            result = result.overrule(of_answers(result.verdict, found.says, False), result.said)
    proof = (*proof[:1], past, *proof[1:]) if past else proof
    return replace(result, headline=f"{headline}, {seen}", proof=proof, next_steps=(AFTER,))


def _of_its_engine(headline: str) -> str:
    """What a known bug is said to do, of the server's engine, and there of a tap, where it is one."""
    said = headline.removeprefix(SPAN)
    at = AT.search(said)
    if said == headline or at is None or said.startswith("either "):
        return headline.replace(SPAN, "the server's engine ")
    return f"{at[1]} of the server's engine {said[: at.start()]}"


SPAN = "embd to result_output: "
AT = re.compile(r" \(at ([^() ]+)\)$")
BY_TAPS = "record taps of its engine, to know the op: llamadiff writer LANGUAGE --model MODEL prints the lines"
AFTER = "if its text is still wrong, look at sampling and stop words, and with --chat at what it makes of a turn"
