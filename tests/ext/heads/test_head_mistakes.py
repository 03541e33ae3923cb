"""Every mistake of a head is found at its place and named, whether or not the trunk was recorded."""

from __future__ import annotations

import pytest
from ext.heads import head_models
from ext.heads.head_mistakes import LATER, MISTAKES, Mistake
from ext.heads.head_runs import TOKENS, HeadRun, of_head
from ext.heads.numpy_head import run_with, run_with_refused
from once import once


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = once(tmp_path_factory, "heads", head_models.write)
    kept: dict[str, HeadRun] = {}

    def get(name):
        if name not in kept:
            kept[name] = HeadRun.of(folder / f"{name}.gguf")
        return kept[name]

    return get


def check_named(mistake: Mistake, one: HeadRun) -> None:
    taps = run_with(one.path, TOKENS, **mistake.steps)
    for some, tap, words in ((taps, mistake.tap, mistake.words), (of_head(taps), mistake.head, mistake.head_words)):
        result = one.judged(some)
        assert result.verdict == "wrong"
        assert result.wrong[0].tap == tap
        assert words in result.summary, result.summary


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found_and_named(mistake, ran):
    check_named(mistake, ran("glm4moe"))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", LATER, ids=lambda mistake: mistake.name)
def test_a_mistake_of_later_is_found_and_named(mistake, ran):
    check_named(mistake, ran("glm4moe"))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [each for each in MISTAKES if each.head == "mtp_h_input"], ids=lambda m: m.name)
def test_it_is_where_the_trunk_rounds(mistake, ran):
    """In its own way: its hidden states are not llama.cpp's."""
    check_named(mistake, ran("glm4moe.Q8_0"))


@pytest.mark.parametrize(("behind", "words"), [
    ([5], "lets tokens see the key of a refused draft: of the one behind token 5"),
    ([*range(4, 11)], "lets tokens see the keys of all refused drafts before them, from that behind token 4 on"),
])  # fmt: skip
def test_a_draft_that_stays_in_the_cache_is_named(behind, words, ran):
    one = ran("glm4moe")
    taps = run_with_refused(one.path, TOKENS, behind)
    for some in (taps, of_head(taps)):
        result = one.judged(some)
        assert result.wrong[0].tap == "attn_out-2"
        assert words in result.summary, result.summary


def test_a_head_without_kept_drafts_is_right(ran):
    one = ran("glm4moe")
    assert one.judged(run_with_refused(one.path, TOKENS, [])).verdict == "match"
