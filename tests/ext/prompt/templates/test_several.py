"""Several mistakes of an engine that renders prompts: named together, counted, with what they leave."""

from __future__ import annotations

import re

import pytest

from llamadiff.ext.prompt.templates.changes import Change, together
from llamadiff.ext.prompt.templates.several import Cases, several

TEXTS = [f"{'A' * (n % 2)}{'b' * (n % 3 == 0)}{'C' * (n % 5 == 0)}." for n in range(60)]
CHANGES = {
    name: Change(name, f"does {name}", f"mend {name}", text=function)
    for name, function in {
        "nothing": lambda x, _: x,
        "upper": lambda x, _: x.upper(),
        "lower": lambda x, _: x.lower(),
        "dot": lambda x, _: x + ".",
        "c": lambda x, _: x.replace("C", "c"),
        "bb": lambda x, _: x.replace("b", "bb"),
        "start": lambda x, _: "<s>" + x,
    }.items()
}


def asked(wanted):
    """What explains an engine's texts: names, and the conversations that are left."""
    order = sorted(range(len(TEXTS)), key=lambda n: wanted[n] == TEXTS[n])
    texts, wanted = [TEXTS[n] for n in order], [wanted[n] for n in order]
    parted = sum(a != b for a, b in zip(texts, wanted, strict=True))

    def text(change, conversation):
        return change.text(conversation["x"], conversation) if change.text is not None else conversation["x"]

    cases = Cases([{"x": each} for each in texts], wanted, parted, text, lambda: False)
    changes, left = several(cases, [*CHANGES.values()])
    return [each.name for each in changes], [texts[n] for n in left]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (["bb"], ["bb"]),
        (["c", "bb"], ["bb", "c"]),  # at their own places, the one of the most texts first
        (["dot", "start"], {"dot", "start"}),  # both in every text
        ([], []),
    ],
    ids=["one", "two", "in every text", "right"],
)
def test_mistakes_are_named_the_largest_first(made, said):
    change = together(*(CHANGES[name] for name in made))
    names, left = asked([change.text(x, {}) if change.text else x for x in TEXTS])
    assert (set(names) if isinstance(said, set) else names, left) == (said, [])


def test_what_is_left_is_told_and_what_nothing_explains_is_not_named():
    bb = CHANGES["bb"].text
    odd = [bb(x, {}) if n % 20 else f"{bb(x, {})}?" for n, x in enumerate(TEXTS)]
    names, left = asked(odd)
    assert (names, len(left)) == (["bb"], 3)
    assert asked([f"{x}{n}" for n, x in enumerate(TEXTS)]) == ([], [])


def test_changes_of_one_kind_are_made_one_after_another():
    made = together(CHANGES["bb"], Change("", "", "", source=lambda text: re.sub("x", "y", text)), CHANGES["dot"])
    assert (made.text("ab", {}), made.source("xx"), made.tree) == ("abb.", "yy", None)
