"""Every mistake of a head is found at its place and named, whether or not the trunk was recorded."""

from __future__ import annotations

import pytest
from ext.heads import head_models
from ext.heads.head_mistakes import MISTAKES
from ext.heads.head_runs import TOKENS, HeadRun, of_head
from ext.heads.numpy_head import run_with
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


@pytest.mark.parametrize("kind", ["", ".Q8_0"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found_and_named(mistake, kind, ran):
    one = ran(f"glm4moe{kind}")
    taps = run_with(one.path, TOKENS, **mistake.steps)
    for some, tap, words in ((taps, mistake.tap, mistake.words), (of_head(taps), mistake.head, mistake.head_words)):
        result = one.judged(some)
        assert result.verdict == "wrong"
        assert result.wrong[0].tap == tap
        assert words in result.summary, result.summary
