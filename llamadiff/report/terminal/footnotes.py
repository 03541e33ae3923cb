"""What stands under the tap table: taps that answer for others, a baseline that is off, values that are not finite."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from rich.text import Text

from llamadiff.judge.verdict import MATCH
from llamadiff.numerics.metrics import Stats
from llamadiff.report.terminal.escape import tiny
from llamadiff.report.terminal.page import STRONG, Page
from llamadiff.report.terminal.tap_lines import baseline_is_off
from llamadiff.result.comparison import Comparison, ask_normal
from llamadiff.result.rows import Row
from llamadiff.words.diagnosis_text import layers_of


def put_notes(page: Page, comparison: Comparison, full: bool) -> None:
    """Print the notes, each kind at most a few lines."""
    kinds: list[Iterable[str | Text]] = [
        _baseline_off(page, comparison), _not_finite(page, comparison), _spans(page, comparison, full),
        _by_sketch(comparison),
    ]  # fmt: skip
    if full:
        kinds += [_reasons(page, comparison), _normal(page, comparison), _short_run(comparison)]
    for note in chain.from_iterable(kinds):
        page.paragraph("  ", note)


def _baseline_off(page: Page, comparison: Comparison) -> Iterator[Text]:
    off = [row for row in comparison.rows if baseline_is_off(row)]
    if not off:
        return
    name, local = page.data(comparison.baseline.get("name", "the baseline"), 60), off[0].baseline_local
    assert local is not None
    others = f"; so are {page.names([row.tap for row in off[1:]], 4)}" if len(off) > 1 else ""
    first = f"{page.data(off[0].tap)}: own error {tiny(local.nmse)}, limit {tiny(local.limit)}"
    yield Text(f"BASELINE OFF: {name} itself is wrong at {first}{others}", STRONG)


def _not_finite(page: Page, comparison: Comparison) -> Iterator[Text]:
    for side in ("baseline", "candidate"):
        rows = [(row, stats) for row in comparison.rows if (stats := getattr(row, side)) and (stats.nan or stats.inf)]
        for row, stats in rows[:1]:
            also = (
                f", and {page.names([other.tap for other, _ in rows[1:]], 4)} have such values too" if rows[1:] else ""
            )
            counts = f"{page.data(row.tap)} of the {side} has {_counts(stats)}"
            yield Text(f"{counts}, left out of rms, mean, min and max{also}", STRONG)


def _reasons(page: Page, comparison: Comparison) -> Iterator[str]:
    """Why the verdict is what it is, and that on each tap that does not simply match."""
    taps = [(row.tap, row.verdict, row.local.reasons) for row in comparison.rows if row.local and row.verdict != MATCH]
    for name, verdict, reasons in (("the run", comparison.verdict, comparison.reasons), *taps):
        if reasons:
            yield page.data(f"why {name} is {verdict.upper()}: {'; then '.join(map(str, reasons))}", 1000)


def _normal(page: Page, comparison: Comparison) -> Iterator[str]:
    """Is it normal: a sentence for each statistic, and what is usual of trained models."""
    found = ask_normal(comparison)
    if found is not None:
        usual = (f"usual: {each.what} ({each.source})" for each in found.usual)
        yield from (page.data(said, 1000) for said in (*(f"normal? {each.says}" for each in found.answers), *usual))


def _counts(stats: Stats) -> str:
    counts = ((stats.nan, "NaN"), (stats.inf, "infinite"))
    named = " and ".join(f"{count} {word}" for count, word in counts if count)
    return f"{named} value{'s' if stats.nan + stats.inf > 1 else ''}"


def _spans(page: Page, comparison: Comparison, full: bool) -> list[Text]:
    """One line for each kind of span; the same span in other layers is counted."""
    wrong = {row.tap for row in comparison.rows if row.misrecorded}
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in comparison.rows:
        if row.span:
            words = (_word(name) for name in (row.tap, *row.span))
            alike.setdefault((*words, _why(row.span, wrong)), []).append(row)
    notes = [Text(_span(page, rows, why)) for (*_, why), rows in alike.items()]
    if full or len(notes) <= 1:
        return notes
    return [notes[0].append(f"; {len(notes) - 1} more such: --full")]


def _why(span: Sequence[str], wrong: Collection[str]) -> str:
    """Why another tap answers for these, some of which were recorded ``wrong``."""
    counted = sum(name in wrong for name in span)
    if not counted:
        return "not recorded"
    return "recorded wrongly" if counted == len(span) else "not recorded, or wrongly"


def _span(page: Page, rows: Sequence[Row], why: str) -> str:
    row, names = rows[0], rows[0].span
    through = (
        page.names(names) if len(names) < 4 else f"{page.data(names[0])} ... {page.data(names[-1])} ({len(names)} taps)"
    )
    others = [other.layer for other in rows[1:] if other.layer is not None]
    also = f" (the same in {layers_of(others)})" if others else ""
    return f"{page.data(row.tap)} answers for {through} too: {why}{also}"


def _by_sketch(comparison: Comparison) -> Iterator[str]:
    """What was verified without computing it all."""
    found = comparison.by_sketch
    if found is not None:
        count = f"{found.taps} products were" if found.taps > 1 else "one product was"
        drawn = f"{found.combinations} random combinations of tokens and of channels, seed {found.seed}"
        yield f"{count} verified by sketch ({drawn}); their errors are estimates"


def _short_run(comparison: Comparison) -> Iterator[str]:
    """That the free run did not see all tokens."""
    free, tokens = comparison.free_tokens, len(comparison.tokens)
    if free is not None and free < tokens:
        explained = any("candidate" in row.distance for row in comparison.rows)
        about = "what rounding explains is" if explained else "drift is"
        yield f"{about} measured over the first {free} of {tokens} tokens, local errors over all; -o DIR/ does both"


def _word(name: str) -> str:
    return name.rsplit("-", 1)[0]
