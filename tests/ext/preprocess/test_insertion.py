"""A picture's rows among the text's: what is right is right, and each mistake of place, position and mask is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from command import run

from llamadiff import UserError
from llamadiff.ext.preprocess.insertion import judge_insertion
from llamadiff.ext.preprocess.text_inputs import GivenInputs, RightInputs, dumped_inputs

WIDE, ROWS, COLUMNS = 64, 3, 4
TEXT = ("<bos>", "Hi", "<start>", *("<image>",) * (ROWS * COLUMNS), "<end>", "what", "?")
FIRST, BEHIND = 3, 3 + ROWS * COLUMNS
COUNT, PICTURE = len(TEXT), slice(3, 3 + ROWS * COLUMNS)


def right(scale=8.0, both_ways=True, sections=3):
    """Gemma's scale and mask, with Qwen2-VL's positions: what no model has together, and each has a part of."""
    random = np.random.default_rng(7)
    table = {word: random.normal(0, 1, WIDE).astype(np.float32) for word in dict.fromkeys(TEXT)}
    embeds = np.stack([scale * table[word] for word in TEXT])
    embeds[PICTURE] = random.normal(0, 1, (ROWS * COLUMNS, WIDE))
    media = np.array([word == "<image>" for word in TEXT])
    positions = np.empty((3, COUNT))
    positions[:, :FIRST] = np.arange(FIRST)
    grid = np.indices((1, ROWS, COLUMNS)).reshape(3, -1)
    positions[:, PICTURE] = FIRST + grid
    positions[:, BEHIND:] = FIRST + max(ROWS, COLUMNS) + np.arange(COUNT - BEHIND)
    mask = np.tri(COUNT, dtype=bool)
    mask[PICTURE, PICTURE] |= both_ways
    ids = np.array([sorted(table).index(word) for word in TEXT])
    place = scale * table["<image>"]
    positions = positions if sections == 3 else np.arange(COUNT)[None].astype(float)
    return RightInputs(ids, embeds, media, positions, {"": mask}, place, TEXT, scale, "Model", "<image>")


RIGHT = right()
MASK = RIGHT.masks[""]


def given(embeds=None, positions=None, mask=None, **more):
    return GivenInputs(
        embeds=RIGHT.embeds if embeds is None else embeds,
        positions=RIGHT.positions if positions is None else positions, mask=MASK if mask is None else mask, **more,
    )  # fmt: skip


def changed(values, *changes):
    found = np.array(values)
    for where, what in changes:
        found[where] = what
    return found


def told(judged):
    return [f"{each.step}: {each.says}" for each in judged.causes]


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_what_is_right_is_right(kind):
    embeds = RIGHT.embeds.astype(kind).astype(np.float32)
    assert told(judge_insertion(RIGHT, given(embeds))) == []
    assert judge_insertion(RIGHT, given(embeds, features=embeds[PICTURE])).causes == ()


def test_an_encoder_that_is_quantized_gives_the_same_rows():
    """What it computes is judged elsewhere; here, which row lies where."""
    noise = np.random.default_rng(1).normal(0, 0.15, RIGHT.embeds[PICTURE].shape)
    judged = judge_insertion(RIGHT, given(changed(RIGHT.embeds, (PICTURE, RIGHT.embeds[PICTURE] + noise))))
    assert judged.causes == ()
    assert "the picture's rows are the encoder's to within 0.0" in judged.notes[-1]


def _smooth(noise):
    """A picture whose rows change slowly, as those of a sky do, and what an encoder that rounds makes of it."""
    random = np.random.default_rng(11)
    ends = random.normal(0, 1, (3, WIDE))
    place = np.linspace(0, 1, ROWS * COLUMNS)[:, None]
    rows = (ends[0] + 0.5 * place * ends[1] + 0.5 * place**2 * ends[2]).astype(np.float32)
    return rows, (rows + noise * random.normal(0, 1, rows.shape)).astype(np.float32)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1, 0.2, 0.3])
def test_rows_that_are_alike_are_in_their_places_whatever_rounding_does(noise):
    rows, rounded = _smooth(noise)
    smooth = replace(RIGHT, embeds=changed(RIGHT.embeds, (PICTURE, rows)))
    assert told(judge_insertion(smooth, given(changed(RIGHT.embeds, (PICTURE, rounded))))) == []


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_rows_that_are_alike_and_in_another_order_are_found(noise):
    rows, rounded = _smooth(noise)
    smooth = replace(RIGHT, embeds=changed(RIGHT.embeds, (PICTURE, rows)))
    judged = judge_insertion(smooth, given(changed(RIGHT.embeds, (PICTURE, rounded[::-1]))))
    assert {each.step for each in judged.causes} <= {"order", "rows"}
    assert judged.causes


def test_equal_rows_may_be_any_of_them():
    """A picture of one colour."""
    flat = replace(RIGHT, embeds=changed(RIGHT.embeds, (PICTURE, RIGHT.embeds[FIRST])))
    assert told(judge_insertion(flat, given(flat.embeds))) == []


def test_positions_that_begin_elsewhere_are_right_and_a_note():
    judged = judge_insertion(RIGHT, given(positions=RIGHT.positions + 5))
    assert judged.causes == ()
    assert "all positions are 5 more; RoPE turns by differences alone" in judged.notes


@pytest.mark.parametrize("mask", ["tri", "full"])
def test_plain_positions_and_masks_of_other_models_are_right(mask):
    other = right(scale=1.0, both_ways=mask == "full", sections=1)
    dump = GivenInputs(embeds=other.embeds, positions=other.positions, mask=other.masks[""])
    assert told(judge_insertion(other, dump)) == []


def _shifted(step):
    embeds = np.array(RIGHT.embeds)
    embeds[FIRST + step : BEHIND + step] = RIGHT.embeds[PICTURE]
    embeds[BEHIND - 1 if step < 0 else FIRST] = RIGHT.placeholder
    return embeds


def _ordered(order):
    return changed(RIGHT.embeds, (PICTURE, RIGHT.embeds[PICTURE][order]))


ALL = np.arange(ROWS * COLUMNS)
HALVES = np.concatenate([ALL[6:], ALL[:6]])
LENGTHS = np.linalg.norm(RIGHT.embeds[PICTURE], axis=1, keepdims=True)
TURNED = ALL.reshape(ROWS, COLUMNS).T.reshape(-1)
ROW_FAULTS = {
    "place: the rows begin 1 place too early, over '<start>': at 2, where the placeholders begin at 3": _shifted(-1),
    "place: the rows begin 1 place too late, over '<end>': at 4, where the placeholders begin at 3": _shifted(1),
    "order: of the picture's 12 rows, the rows are rolled: each is 6 places later": _ordered(HALVES),
    "order: of the picture's 12 rows, they lie column by column; the grid of 3 x 4": _ordered(TURNED),
    "order: of the picture's 12 rows, the rows are in reverse order": _ordered(ALL[::-1]),
    "rows: 1 of the picture's 12 rows is missing: row 4|rows: row 3 of the picture is there more than once":
        _ordered([0, 1, 2, 3, 3, *range(5, 12)]),
    "scale: the picture's rows are multiplied by 8, this model's scale of text embeddings, which is for text alone":
        changed(RIGHT.embeds, (PICTURE, 8 * RIGHT.embeds[PICTURE])),
    "scale: the picture's rows are multiplied by 0.125, 1 / 8":
        changed(RIGHT.embeds, (PICTURE, RIGHT.embeds[PICTURE] / 8)),
    "rows: 12 of the picture's 12 rows are missing: rows 0 to 11|rows: places 3 to 14 still have the embedding of "
    "<image> itself": changed(RIGHT.embeds, (PICTURE, RIGHT.placeholder)),
    "rows: rows 3 to 14 of 18 are neither the prompt's tokens nor what the encoder gives":
        changed(RIGHT.embeds, (PICTURE, np.random.default_rng(9).normal(0, 1, (12, WIDE)))),
    "rows: all 12 rows of the picture are one and the same": changed(RIGHT.embeds, (PICTURE, RIGHT.embeds[FIRST])),
    "scale: the picture's rows are scaled to the length 1 each":
        changed(RIGHT.embeds, (PICTURE, RIGHT.embeds[PICTURE] / LENGTHS)),
    "rows: values of the embeddings are NaN or Inf": changed(RIGHT.embeds, ((5, 3), np.nan)),
}  # fmt: skip


@pytest.mark.parametrize("says", ROW_FAULTS)
def test_rows_that_are_wrong_are_named_and_nothing_else(says):
    causes = told(judge_insertion(RIGHT, given(ROW_FAULTS[says])))
    if says.startswith(("place", "rows: values")):  # the place that is left over is said, too; NaN is no row
        causes = causes[:1]
    assert len(causes) == len(says.split("|"))
    for cause, wanted in zip(causes, says.split("|"), strict=True):
        assert wanted in cause


def test_rows_that_are_added_to_the_placeholder():
    small = replace(RIGHT, placeholder=RIGHT.placeholder / 24)
    embeds = changed(RIGHT.embeds, (PICTURE, RIGHT.embeds[PICTURE] + small.placeholder))
    (cause,) = told(judge_insertion(small, given(embeds)))
    assert cause == "rows: the picture's rows are added to the embedding of <image>, which they should replace"


def test_text_that_is_not_scaled():
    embeds = np.where(RIGHT.is_media[:, None], RIGHT.embeds, RIGHT.embeds / 8)
    (cause,) = told(judge_insertion(RIGHT, given(embeds)))
    says = "scale: the text's embeddings are multiplied by 0.125, 1 / 8, this model's scale of text embeddings"
    assert cause == f"{says}: it was left out"


@pytest.mark.parametrize(
    ("lost", "says"),
    [(0, "missing: '<bos>' (0), at the beginning"), (2, "before the picture"), (BEHIND, "behind the picture")],
)
def test_a_token_that_is_missing(lost, says):
    """All behind it has moved, which is no other mistake."""
    kept = np.delete(np.arange(COUNT), lost)
    positions = RIGHT.positions[:, kept] - (kept > lost)
    (cause,) = told(judge_insertion(RIGHT, given(RIGHT.embeds[kept], positions, MASK[np.ix_(kept, kept)])))
    assert cause.startswith("tokens: missing: ")
    assert says in cause
    if lost:
        assert TEXT[lost] in cause


def test_a_row_that_is_lost():
    for lost in (FIRST + 2, BEHIND - 1):
        kept = np.delete(np.arange(COUNT), lost)
        dump = given(RIGHT.embeds[kept], RIGHT.positions[:, kept], MASK[np.ix_(kept, kept)])
        assert told(judge_insertion(RIGHT, dump)) == [
            f"rows: 1 of the picture's 12 rows is missing: row {lost - FIRST}"
        ]


def test_a_picture_of_another_size_is_sent_to_what_judges_it():
    rows = np.random.default_rng(3).normal(0, 1, (20, WIDE))
    embeds = np.concatenate([RIGHT.embeds[:FIRST], rows, RIGHT.embeds[BEHIND:]]).astype(np.float32)
    (cause,) = told(judge_insertion(RIGHT, GivenInputs(embeds=embeds)))
    assert "20 rows are inserted, the checkpoint's encoder gives 12" in cause
    assert "llamadiff preprocess without --prompt" in cause


P, HERE = RIGHT.positions, "positions: within the picture at 3, "
GRID = slice(1, 3), PICTURE
POSITION_FAULTS = [
    (changed(P, (GRID, P[[2, 1], PICTURE])), HERE + "height and width are exchanged"),
    (changed(P, ((0, PICTURE), FIRST + ALL)), HERE + "temporal: counting on with every row; it is one number for all"),
    (np.arange(COUNT)[None], HERE + "every row has the next position, as text has; its grid of 3 x 4 is right"),
    (changed(P, ((slice(None), PICTURE), FIRST)), HERE + "all rows have one position"),
    (changed(P, ((1, PICTURE), P[1, PICTURE] * 2 - FIRST)), HERE + "height: in steps of 2; 1 is right"),
    (changed(P, ((slice(None), slice(BEHIND, None)), BEHIND + np.arange(COUNT - BEHIND))),
     "positions: the text behind the picture goes on by its number of rows, 12; 4 behind its first, one beyond its"),
    (changed(P, ((slice(None), slice(BEHIND, None)), P[:, BEHIND:] - 1)),
     "positions: the text behind the picture goes on at its largest position itself; 4 behind its first"),
    (changed(P, ((slice(None), slice(BEHIND, None)), P[:, BEHIND:] - 3)), "goes on one behind its first position"),
    (changed(P, ((slice(None), PICTURE), P[:, PICTURE] - FIRST)),
     "positions: temporal and height and width of the picture begin at 0, not behind the text before it"),
    (P[[1, 2, 0]], HERE + "the sections lie in another order: height, width, temporal"),
    (np.zeros((3, COUNT)), "positions: all positions are 0"),
    (changed(P, ((slice(None), slice(BEHIND, None)), P[:, BEHIND:] + np.arange(COUNT - BEHIND))),
     "positions: within the text at 15, temporal and height and width: in steps of 2; 1 is right"),
    (changed(P, (GRID, P[GRID] - FIRST)), "positions: height and width of the picture begin at 0"),
    (changed(P, ((slice(None), slice(FIRST, None)), P[:, FIRST:] + 1)), "the picture begins at 1 more than is right"),
]  # fmt: skip


@pytest.mark.parametrize(("positions", "says"), POSITION_FAULTS, ids=[each[1][-40:] for each in POSITION_FAULTS])
def test_positions_that_are_wrong_are_named_and_nothing_else(positions, says):
    (cause,) = told(judge_insertion(RIGHT, given(positions=positions)))
    assert says in cause


TEXT_BEHIND = np.s_[BEHIND:, PICTURE]
MASK_FAULTS = [
    (RIGHT, changed(MASK, ((PICTURE, PICTURE), np.tri(12, dtype=bool))), "causal within the picture; its rows"),
    (right(both_ways=False), MASK, "both ways within the picture; its rows see those before them alone (66 pairs)"),
    (RIGHT, np.ones_like(MASK), "every row sees every row, later ones too: there is no mask"),
    (RIGHT, changed(MASK, (TEXT_BEHIND, False)), "the text behind the picture does not see all of it (36 pairs)"),
    (RIGHT, changed(MASK, ((PICTURE, slice(0, 3)), False)), "the picture does not see the text before it"),
    (right(both_ways=False), np.tri(COUNT, dtype=bool) & ~np.tri(COUNT, k=-5, dtype=bool),
     "each row sees 5 rows alone, its own and those before it; all before it is right"),
    (RIGHT, changed(MASK, ((slice(None), slice(0, 2)), False)), "no row sees rows 0 to 1"),
    (RIGHT, changed(MASK, ((-1, 1), False)), "row 17 does not see row 1, and so in 1 pairs"),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "mask", "says"), MASK_FAULTS, ids=[each[2][:40] for each in MASK_FAULTS])
def test_masks_that_are_wrong_are_named_and_nothing_else(wanted, mask, says):
    (cause,) = told(judge_insertion(wanted, given(mask=mask)))
    assert cause.startswith(f"mask: {says}")


def test_rows_that_its_own_encoder_gave_and_that_were_not_inserted():
    more = np.concatenate([RIGHT.embeds[PICTURE], np.ones((1, WIDE), np.float32)])
    (cause,) = told(judge_insertion(RIGHT, given(features=more)))
    assert cause == "rows: its encoder gave 13 rows, the checkpoint's gives 12"


def test_rows_of_an_encoder_that_is_wrong_are_judged_by_their_places():
    rows = np.random.default_rng(2).normal(0, 1, (12, WIDE)).astype(np.float32)
    (cause,) = told(judge_insertion(RIGHT, given(changed(RIGHT.embeds, (PICTURE, rows)), features=rows)))
    assert cause.startswith("rows: its encoder's rows are not the checkpoint's: 1.00 of")
    causes = told(judge_insertion(RIGHT, given(changed(RIGHT.embeds, (PICTURE, rows[::-1])), features=rows)))
    assert causes == [cause, "order: of the picture's 12 rows, the rows are in reverse order"]


def test_a_dump_is_read_in_the_forms_that_engines_have(tmp_path):
    """Axes of one before, four sections of ggml's or of transformers', masks that are added, and of ones."""
    added = np.where(MASK, 0.0, -np.inf).astype(np.float32)
    ggml, theirs = np.concatenate([P, np.zeros((1, COUNT))]), np.concatenate([np.arange(COUNT)[None], P])
    for positions in (P, P[:, None], ggml, theirs[:, None]):
        for mask in (added[None, None], MASK, MASK.astype(np.int64)):
            path = tmp_path / "inputs.npz"
            np.savez(
                path, inputs_embeds=RIGHT.embeds[None], position_ids=positions.astype(np.int64), attention_mask=mask
            )
            judged = judge_insertion(RIGHT, dumped_inputs(path))
            assert (judged.causes, judged.notes) == ((), ())


def test_what_was_not_given_is_said(tmp_path):
    np.savez(tmp_path / "inputs.npz", inputs_embeds=RIGHT.embeds, attention_mask=np.ones((1, COUNT), np.int64))
    judged = judge_insertion(RIGHT, dumped_inputs(tmp_path / "inputs.npz"))
    assert judged.causes == ()
    assert [note.partition(",")[0] for note in judged.notes] == [
        "position_ids were not given", "no mask [row"
    ]  # fmt: skip


def _kept(folder, graph, **arrays):
    for name, values in arrays.items():
        np.save(folder / f"{graph}-{name}.npy", values)


def test_what_watch_keeps_is_put_together(tmp_path):
    """A warm-up, text, an encoder, its rows in two decodes, text, and a token that was generated."""
    added = np.where(MASK, 0.0, -np.inf).astype(np.float16)
    room = np.full((COUNT + 1, 32), -np.inf, np.float16)
    room[:COUNT, :COUNT], room[COUNT, : COUNT + 1] = added, 0.0
    positions = np.concatenate([P, np.zeros((1, COUNT))]).astype(np.int32)
    ids = RIGHT.ids.astype(np.int32)
    _kept(tmp_path, 0, inp_tokens=ids[:2], inp_pos=positions[:, :2], mask=room[:2])
    _kept(tmp_path, 1, encoder_output=np.ones((12, WIDE), np.float32))
    _kept(tmp_path, 2, inp_tokens=ids[:FIRST], inp_pos=positions[:, :FIRST], mask=room[:FIRST])
    _kept(tmp_path, 3, encoder_output=RIGHT.embeds[None, None, PICTURE])
    for graph, part in ((4, slice(FIRST, 8)), (5, slice(8, BEHIND))):
        _kept(tmp_path, graph, inp_embd=RIGHT.embeds[part], inp_pos=positions[:, part], mask=room[part])
    _kept(tmp_path, 6, inp_tokens=ids[BEHIND:], inp_pos=positions[:, BEHIND:], mask=room[BEHIND:COUNT])
    _kept(tmp_path, 7, inp_tokens=ids[:1], inp_pos=np.array([[9], [9], [9], [0]], np.int32), mask=room[COUNT:])
    judged = judge_insertion(RIGHT, dumped_inputs(tmp_path))
    assert (judged.causes, judged.notes, judged.rows) == ((), (), COUNT)
    _kept(tmp_path, 4, inp_embd=RIGHT.embeds[8:13])
    assert judge_insertion(RIGHT, dumped_inputs(tmp_path)).causes


@pytest.mark.parametrize(
    "what",
    [
        "no such file", "holds no decode of embeddings", "has none of inputs_embeds", "has 0 rows; from 1 to 8192",
        "do not fit together", "is no archive of np.savez", "no array of numbers",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(what, tmp_path):
    path = tmp_path / "dump.npz"
    if what == "has 0 rows; from 1 to 8192":
        np.savez(path, inputs_embeds=np.ones((0, WIDE)))
    elif what == "do not fit together":
        path = tmp_path
        _kept(path, 0, inp_embd=np.ones((4, WIDE), np.float32), inp_pos=np.zeros(3, np.int32))
    elif what == "is no archive of np.savez":
        path.write_bytes(b"PK\3\4 and no more")
    elif what == "no array of numbers":
        np.savez(path, inputs_embeds=np.array([{"a": 1}], object))
    if what == "has none of inputs_embeds":
        np.savez(path, other=np.ones(3))
    elif what.startswith("holds"):
        path = tmp_path
    with pytest.raises(UserError, match=what):
        dumped_inputs(path)


def test_name_and_prompt_together_are_refused(tmp_path):
    done = run("preprocess", tmp_path, "a.png", "--candidate", "x.npz", "--prompt", "Hi", "--name", "y")
    assert done.returncode == 2
    assert "give --name or --prompt" in done.stderr
