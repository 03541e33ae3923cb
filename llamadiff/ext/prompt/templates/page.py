"""Templates compared, as a page of 80 columns, and as JSON. Computes nothing."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.text import Text

from llamadiff.ext.prompt.templates.apart import TextParting
from llamadiff.ext.prompt.templates.conversations import Conversation
from llamadiff.ext.prompt.templates.run import Parting, Place, Templates
from llamadiff.judge.verdict import MATCH, UNCHECKED
from llamadiff.report.json import in_json
from llamadiff.report.terminal.page import Page

SCHEMA = "llamadiff.extras.templates/1"
BEFORE, AFTER = 24, 40  # characters that are shown around the first one that is not the same
MOST_COPIED = 4000  # characters of a conversation
CONVERT = "where one of both is the checkpoint's, convert the file that has the other again"
FEW = 3  # other causes, and branches, that are shown


def print_templates(found: Templates, console: Console) -> None:
    """The verdict, what to do, the smallest conversations with both texts, and what was not looked at."""
    page = Page(console)
    page.paragraph(Text(f"{found.verdict.upper()}  ", page.style_of(found.verdict)), page.data(headline(found), 1000))
    if found.mistakes:
        page.blank()
    for cause in found.mistakes:
        page.print_labelled("fix", page.data(cause.fix, 1000))
    for place in found.places:
        _put_place(page, found, place)
    page.blank()
    for line in notes(found):
        page.print_labelled("", page.data(line, 1000))


def headline(found: Templates) -> str:
    """The finding in a sentence."""
    every = len(found.chosen.conversations)
    if found.verdict == UNCHECKED:
        return "the template refuses every conversation that was made for it"
    if found.verdict == MATCH:
        own = ", in llama-server's own ways with messages" if found.ways else ""
        return f"the candidate renders all {every} conversations as the template says{own}"
    first = found.places[0]
    share = f"in {found.parted} of {every} conversations"
    if found.apart is not None or found.mistakes:
        text = None if found.apart is None else f"template: {_text(found, found.apart)}; other prompts {share}"
        return text or _several(found, share)
    where = f"; the smallest has {messages_of(first.smallest.conversation)}"
    if first.causes and first.count == found.parted:
        return f"template: the candidate {first.causes[0].says}, {share}{where}"
    if first.smallest.error is not None:
        return f"template: the candidate refuses what the template renders, {share}{where}"
    at = f" at line {first.smallest.line}" if first.smallest.line is not None else ""
    return f"template: the candidate parts from it{at}, {share}{where}"


def _several(found: Templates, share: str) -> str:
    """The mistakes of which none alone explains all that parts."""
    says = "; ".join(cause.says for cause in found.mistakes)
    count = f"{len(found.mistakes)} mistakes: " if found.mistakes[1:] else ""
    part = f"; {found.left} of these ({found.left / found.parted:.0%}) part besides, for no known reason"
    return f"{count}template: the candidate {says}, {share}{part * bool(found.left)}"


def _text(found: Templates, apart: TextParting) -> str:
    """Where two templates part as texts."""
    return apart.says(found.source.path.name, found.candidate)


def messages_of(conversation: Conversation) -> str:
    """A conversation in a few words: ``user, assistant with tool_calls; tools``."""
    kinds = []
    for message in conversation["messages"]:
        content, more = message.get("content"), [key for key in message if key not in ("role", "content")]
        what = "a list" if isinstance(content, list) else "" if content else "no content"
        having = " and ".join(filter(None, [what, *more]))
        kinds.append(f"{message['role']} with {having}" if having else str(message["role"]))
    settings = [key for key in conversation if key not in ("messages", "add_generation_prompt")]
    return "; ".join(filter(None, [", ".join(kinds), ", ".join(settings)]))


def notes(found: Templates) -> list[str]:
    """What was looked at."""
    chosen, branches = found.chosen, len(found.branches)
    lines = [
        f"{found.source.path.name}: {len(chosen.conversations)} conversations, of which {chosen.needed} reach "
        f"{len(chosen.reached)} of the template's {branches} branches; it refuses {chosen.refused} more"
    ]
    if found.unreached:
        shown = [f"line {line} ({way})" for line, way in found.unreached[:FEW]]
        more = f" and {len(found.unreached) - FEW} more" if len(found.unreached) > FEW else ""
        lines.append(f"not reached: {', '.join(shown)}{more}")
    for each in found.ways:
        lines.append(f"no mistake of {each.count} prompts: the server {each.way.says}")
    if found.apart is not None:
        unseen = f"{_text(found, found.apart)}; no conversation that was made shows it"
        lines.append(CONVERT if found.parted else unseen)
    if found.lacking_bos:
        bos = found.source.tokens["bos_token"]
        lines.append(f"{found.lacking_bos} prompts have no {bos}: right, since tokenizing adds it for this file")
    return lines


def _put_place(page: Page, found: Templates, place: Place) -> None:
    page.blank()
    part, causes = place.smallest, place.causes if found.apart is None else ()  # two texts show what they do otherwise
    if found.apart is not None:
        page.print_labelled("place", f"{place.count} of {found.parted} prompts")
    elif found.mistakes:
        if place.count == found.left:
            page.print_labelled("besides", f"{place.count} of {found.parted}: no known mistake explains them")
    elif place.count < found.parted:
        says = f"the candidate {causes[0].says}" if causes else "no known mistake explains them"
        page.print_labelled("place", page.data(f"{place.count} of {found.parted}: {says}", 1000))
    elif not causes:
        page.print_labelled("cause", "no known mistake explains all of them")
    if causes:
        page.print_labelled("fix", page.data(causes[0].fix, 1000))
    for other in causes[1:FEW]:
        page.print_labelled("or", page.data(f"the candidate {other.says}", 1000))
    if part.line is not None:
        page.print_labelled("line", f"{part.line}  {page.as_it_is(found.source.line(part.line), 400)}")
    words = page.as_it_is(json.dumps(part.conversation, ensure_ascii=False), MOST_COPIED)
    page.console.print(Text(f"messages {words}"), soft_wrap=True)
    _put_texts(page, part)


def _put_texts(page: Page, part: Parting) -> None:
    """Both around the first character that is not the same, under each other; a mark under it."""
    if part.theirs is None:
        page.print_labelled("error", page.data(" ".join((part.error or "").split()), 1000))
        return
    start = max(0, part.offset - BEFORE)
    dots = "..." if start else ""
    same = page.data(part.ours[start : part.offset])
    for word, text in (("template", part.ours), ("yours", part.theirs)):
        rest = page.data(text[part.offset : part.offset + AFTER]) or "(ends here)"
        page.put(Text(f"{word:9}{dots}{same}{rest}"))
    page.put(Text(" " * (9 + len(dots) + Text(same).cell_len) + "^"))


def as_json(found: Templates) -> str:
    """Everything, machine-readable."""
    chosen = found.chosen
    about: dict[str, Any] = {
        "schema": SCHEMA, "verdict": found.verdict, "headline": headline(found), "model": str(found.source.path),
        "candidate": found.candidate, "conversations": len(chosen.conversations), "needed": chosen.needed,
        "refused": chosen.refused, "parted": found.parted, "left": found.left,
        "mistakes": [{"name": each.name, "says": each.says, "fix": each.fix} for each in found.mistakes],
        "lacking_bos": found.lacking_bos,
        "apart": found.apart,
        "ways": [{"name": each.way.slot, "says": each.way.says, "count": each.count} for each in found.ways],
        "branches": len(found.branches), "reached": len(chosen.reached),
        "unreached": [_line(found, line) | {"way": way} for line, way in found.unreached],
        "places": [_place(found, place) for place in found.places],
    }  # fmt: skip
    return in_json(about)


def _place(found: Templates, place: Place) -> dict[str, Any]:
    part = place.smallest
    return {
        "count": place.count, "line": None if part.line is None else _line(found, part.line),
        "conversation": part.conversation, "offset": part.offset, "template": part.ours, "candidate": part.theirs,
        "error": part.error,
        "causes": [{"name": each.name, "says": each.says, "fix": each.fix} for each in place.causes],
    }  # fmt: skip


def _line(found: Templates, number: int) -> dict[str, Any]:
    return {"number": number, "text": found.source.line(number)}
