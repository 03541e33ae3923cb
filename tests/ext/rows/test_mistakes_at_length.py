"""Mistakes that show at length are found at their tap and their first token, and right engines are none the worse."""

from __future__ import annotations

import re

import pytest
from ext.rows.long_mistakes import LONG, MISTAKES, RIGHT, SHORT, Change
from ext.rows.long_runs import Runs

# What is said at any length, of those that are read back; of the others no more than where they are.
SAID = {
    "positions_in_bf16": "its positions are rounded to bfloat16, which holds whole numbers up to 256",
    "positions_in_f16": "its positions are rounded to float16, which holds whole numbers up to 2048",
    "angles_in_f16": "its angles are rounded to float16",
    "angles_in_bf16": "its angles are rounded to bfloat16",
    "positions_in_int16": "positions from 32768 to 32999 are taken for -32768 to -32537",
    "positions_in_uint8": "its positions begin again at 0 after each 256",
    "table_clamped": "positions beyond (499 are taken for 499|4099 are taken for 4099)",
    "table_wrapped": "its positions begin again at 0 after each (500|4100)",
    "positions_start_again": "its positions begin again at 0 after each (256|2048)",
    "key_positions_lag": r"rotates by the position - 1; .*, from token (256|2048) on alone",
    "chunk_begins_one_late": "are taken for (257|2049) to .*; positions from .* are taken for (514|4098)",
    "second_chunk_not_rotated": "does not rotate at all, for tokens (256 to 511|2048 to 4095) alone",
    "yarn_magnitude_missing": "leaves out the attention factor; this model multiplies cos and sin by 1.139",
    "yarn_magnitude_of_q_alone": "leaves out the attention factor; this model multiplies cos and sin by 1.139",
    "yarn_twice": "scales frequencies by YaRN twice",
    "yarn_wrong_original": "blends YaRN's frequencies as of an original context of 8192, where 512 is right",
    "long_with_short_factors": "takes LongRoPE's factors of a short context",
    "long_factors_by_position": "takes LongRoPE's factors of a short context .* is right, for tokens 1 to 511 alone",
    "linear_missing": "ignores the scaling by 4 that the file asks for",
    "window_ignored": "see all keys up to their own, where the last 128 are right",
    "window_one_more": "see the last 129 keys alone, their own included, where the last 128 are right",
    "window_one_fewer": "see the last 127 keys alone, their own included, where the last 128 are right",
    "wide_window_one_more": "see the last 4097 keys alone, their own included, where the last 4096 are right",
    "window_everywhere": "see the last 128 keys alone, their own included, where all are right",
    "window_of_the_other_layers": "see all keys up to their own, where the last 128 are right",
    "ring_one_too_small": "position 256 does not see key 129|position 2048 does not see key 1921",
    "oldest_dropped": "see the last (500|4100) keys alone, their own included, where all are right",
    "sinks_and_a_window": "see the first 4 keys and the last 300 alone, where all are right",
    "mask_from_the_chunks_start": "see keys only up to their place in a chunk of (256|2048)",
    "earlier_chunks_unseen": "see no key before the last multiple of (256|2048), where all are right",
    "first_key_of_each_chunk_unseen": "see all but keys (256, 512|2048, 4096)",
    "next_token_seen_in_later_chunks": "see the key behind their own too",
    "padding_seen": "see (168|1144) rows of zeros besides, with a score of zero",
    "page_from_the_first": "see a page of keys from 0 on in place of the one from 320 on",
    "last_partial_block_ignored": "see no key behind key (511|4991)",
    "last_tile_not_computed": "are all zero",
    "logits_of_the_row_before": "wrong tokens have the values of the one before them",
    "ids_of_the_chunk_before": "wrong tokens have the values of the one (256|2048) before them",
    "tile_reads_the_first_rows": "wrong tokens have the values of (others: token|the one)",
    "v_of_a_chunk_shifted": "wrong tokens have the values of the one before them",
    "chunk_not_written": "wrong tokens have the values of the one (256|2048) before them",
    "prefix_of_another_prompt": "wrong tokens have the values of (others: token|the one)",
}
# What rounding may be: K or V in steps, sums in float16. No cause is read back of these; some are taken for rounding.
ROUNDINGS = {
    "k_in_int8_with_one_scale", "error_of_v_fed_back", "old_rows_in_four_bits", "softmax_sum_in_f16", "mixed_in_f16",
}  # fmt: skip
LATER = {"angles_in_f16", "angles_in_bf16", "page_overwritten"}  # whose first rows are hardly off, or were not written
QUICK = ("window_one_more", "earlier_chunks_unseen", "positions_in_bf16", "long_with_short_factors")
BY_NAME = {each.name: each for each in MISTAKES}
CASES = [(each, length) for each in MISTAKES for length in each.lengths if length < LONG]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("long"))


def _is_found(runs: Runs, mistake: Change, length: int, asked: str = "auto", rows: tuple[int, ...] = ()) -> None:
    found = runs.judged(mistake, length, asked, rows)
    assert (found.tap, found.result.verdict) == (mistake.first, "wrong"), found.result.headline
    assert found.result.first_divergence is not None
    assert found.result.first_divergence.tap == mistake.first
    assert found.first_token is not None
    assert found.first_token == found.token or (mistake.name in LATER and found.first_token > found.token)
    assert re.search(SAID.get(mistake.name, ""), found.result.headline)


@pytest.mark.parametrize("name", QUICK)
def test_a_mistake_is_found_in_rows_of_a_run(runs: Runs, name: str):
    _is_found(runs, BY_NAME[name], SHORT)


def test_a_mistake_is_found_in_rows_that_are_asked_for_of_a_whole_trace(runs: Runs):
    found = runs.judged(BY_NAME["oldest_dropped"], SHORT, "0-7,494-503,590-599", range(SHORT))
    assert len(found.result.tokens) == 28
    assert "tokens looked at from 500 to 599 see the last 500 keys alone" in found.result.headline


@pytest.mark.parametrize("rows", [[0, 1, 2, 50, 200, 300, 598, 599], [*range(90), *range(200, 260), 599]], ids=len)
def test_a_page_of_k_that_nobody_asked_for_is_held_against_llama_cpps(runs: Runs, rows: list[int]):
    """Its tokens are named as they are, however many rows there are."""
    found = runs.judged(BY_NAME["page_overwritten"], SHORT, rows=rows)
    assert found.result.verdict == "wrong"
    assert "kv_k-0 of tokens 100-115 differs from llama.cpp's" in found.result.headline
    assert found.result.wrong == ()  # attention is right on what the cache has


def test_a_right_engine_is_right_in_rows(runs: Runs):
    _is_right(runs, next(each for each in RIGHT if each.name == "blocks_from_the_end"), SHORT)


def _is_right(runs: Runs, change: Change, length: int) -> None:
    assert runs.judged(change, length).result.verdict in ("match", "noise")


@pytest.mark.parametrize(("mistake", "length"), CASES, ids=lambda each: getattr(each, "name", str(each)))
def test_every_mistake_is_found_at_length(runs: Runs, mistake: Change, length: int):
    if mistake.name in ROUNDINGS:
        result = runs.judged(mistake, length).result
        assert result.first_divergence is None or result.first_divergence.tap.startswith(mistake.first[:-1])
    else:
        _is_found(runs, mistake, length)


@pytest.mark.parametrize(
    ("change", "length"), [(each, length) for each in RIGHT for length in each.lengths],
    ids=lambda each: f"{each.name}-{each.model}" if isinstance(each, Change) else str(each),
)  # fmt: skip
def test_every_right_engine_is_right_at_length(runs: Runs, change: Change, length: int):
    _is_right(runs, change, length)


def test_positions_of_sixteen_bits_are_found_behind_32768(runs: Runs):
    _is_found(runs, BY_NAME["positions_in_int16"], LONG)
