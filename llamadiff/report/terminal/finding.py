"""The finding on a page: verdict and headline, the proof under them, then fix, place and what else to do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from shlex import quote

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from llamadiff.report.facts import mistakes
from llamadiff.report.terminal.page import STRONG, Page
from llamadiff.result.comparison import Comparison
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.result.rows import Row, stem
from llamadiff.words import advice
from llamadiff.words import diagnosis_text as say
from llamadiff.words.blame import headline, proof

_FEW = 3  # fixes, facts, steps
_PROOF = 300  # characters of proof that a report has unless the full one is asked for


def put_headline(page: Page, comparison: Comparison, full: bool) -> None:
    """Print verdict and finding in a line, and what proves it under them."""
    label = page.badge(comparison.verdict)
    page.paragraph(label, Text(page.data(comparison.headline, 1000), STRONG))
    if comparison.proof:
        said = "; ".join(comparison.proof if full else _few_clauses(comparison.proof))
        page.paragraph(Text(" " * label.cell_len), Text(page.data(said, 4000)))


def _few_clauses(proof: Sequence[str]) -> list[str]:
    """As many clauses as a few lines hold, the first at least, and how many more there are."""
    sizes = list(accumulate(map(len, proof)))
    count = max(1, sum(size <= _PROOF for size in sizes))
    left = len(proof) - count
    return [*proof[:count], *([f"{left} more line{'s' * (left > 1)} of proof: --full"] if left else [])]


def put_last_line(page: Page, comparison: Comparison) -> None:
    """Print the verdict once more: the beginning of a long report is out of sight."""
    label = page.badge(comparison.verdict)
    seconds = comparison.timing.get("total_s")
    tail = f"  ({seconds:.1f} s)" if seconds is not None else ""
    room = max(1, page.width - label.cell_len - cell_len(tail))
    page.put(Text.assemble(label, (page.data(comparison.headline, room), STRONG), tail))


def put_fixes(page: Page, comparison: Comparison, full: bool) -> None:
    """Print what to do about each known bug, and the place with both values."""
    known = mistakes(comparison)
    most = len(known) if full else _FEW
    for d in known[:most]:
        page.print_labelled("fix", _fix(page, d, len(known) > 1, full))
    if known[most:]:
        page.print_labelled("fix", f"{len(known) - most} more: --full shows them")
    if known:
        page.print_labelled("more", f"llamadiff explain {quote(' + '.join(d.causes[0].name for d in known[:most]))}")
    first = comparison.leading
    if first is not None and first.local is not None:
        others = [row for row in comparison.wrong if stem(row.tap) != stem(first.tap)]
        is_told = first.misrecorded or any(first.tap in d.taps for d in known)
        page.print_labelled("place", page.data(_place(first, comparison.headline, full or not is_told), 1000))
        _put_errors(page, others, known)


def _put_errors(page: Page, others: Sequence[Row], known: Sequence[Diagnosis]) -> None:
    """Print what the errors of other ops without a known cause look like, one tap of each."""
    explained = {tap for d in known for tap in d.taps}
    open_ones = {stem(row.tap): row for row in reversed(others) if row.tap not in explained and not row.misrecorded}
    for row in list(reversed(open_ones.values()))[:_FEW]:
        if row.local is not None and row.local.facts:
            facts = "; ".join(fact.says for fact in row.local.facts)
            page.print_labelled("error", page.data(f"{row.tap}: {facts}", 1000))


def put_next_steps(page: Page, comparison: Comparison) -> None:
    """Print what to do besides."""
    said = {advice.fix_step(d) for d in mistakes(comparison)}
    if comparison.leading is not None and comparison.leading.local is not None:
        said.add(advice.place_step(comparison.leading))
    for step in comparison.next_steps:
        if step not in said:
            page.print_labelled("next", page.data(step, 2000))


def _fix(page: Page, d: Diagnosis, several: bool, full: bool) -> Text:
    """What to do, the known bug's name, and in full who had it before."""
    text = Text(f"{page.data(d.tap)}: " if several else "")
    text.append(page.data(say.fix(d), 1000))
    text.append(f" ({page.data(say.names(d.causes), 120)}")
    sources = [source for source in d.causes[0].source.split(", ") if source and full]
    for number, source in enumerate(sources):
        text.append(", " if number else "; known from ")
        address = page_of(source)
        text.append(page.data(source), Style(link=address) if address else "")
    return text.append(")")


def _place(row: Row, headline: str, with_facts: bool) -> str:
    """Where the leading tap is most off, with both values; where no cause says it, what more its error looks like."""
    assert row.local is not None
    facts = [fact.says for fact in row.local.facts[:_FEW] if fact.says not in headline] if with_facts else []
    return "; ".join((advice.place_step(row), *facts))


def put_causes(page: Page, comparison: Comparison) -> None:
    """Print every diagnosis in full: what the op does, where, and the proof."""
    for d in comparison.diagnosis:
        name = say.names(d.causes) if d.known else "unknown"
        said = "; ".join((headline(d, comparison.rows), *(proof(d, comparison.rows) if d.known else ())))
        body = Text.assemble((page.data(name, 120), STRONG), f": {page.data(said, 2000)}")
        page.print_labelled("noise" if d.harmless else "cause", body)


# Of the repositories that known bugs name without their owner, those that have one meaning.
_OWNERS = {
    "llama.cpp": "ggml-org", "TinyLlama": "jzhang38", "candle": "huggingface", "transformers": "huggingface",
    "vllm": "vllm-project", "sglang": "sgl-project", "mlx-lm": "ml-explore", "mlx-vlm": "Blaizzy",
    "onnxruntime-genai": "microsoft", "ollama": "ollama",
}  # fmt: skip


def page_of(source: str) -> str | None:
    """The page of a thread such as ``llama.cpp#22611``; None where its owner is not known."""
    name, _, number = source.partition("#")
    if name not in _OWNERS or not number.isdecimal():
        return None
    return f"https://github.com/{_OWNERS[name]}/{name}/issues/{number}"
