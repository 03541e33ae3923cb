"""Who sees whom, and what a sequence consists of, by the tokens' history alone."""

from __future__ import annotations

import pytest

from llamadiff.ext.state.history import END, REMOVED, ROW, SHIFTED, History, Window


def batch(history, *tokens):
    """Tokens of sequences at their next positions -> rows. A token is its sequence's number and its id."""
    made = []
    for sequence, token in tokens:
        made += history.decode([token], [history.end(sequence)], [sequence])
    return made


def rows(life):
    return [number for what, of in life for number in of if what == ROW]


def test_a_token_sees_its_own_sequence_up_to_itself():
    made = batch(History(), (0, 5), (1, 6), (0, 7), (1, 8))
    assert [dict(row.sees) for row in made] == [{0: 0}, {1: 0}, {0: 0, 2: 1}, {1: 0, 3: 1}]
    assert [rows(row.life) for row in made] == [[0], [1], [0, 2], [1, 3]]


def test_what_is_taken_back_was_never_there():
    history = History()
    batch(history, (0, 5), (0, 6), (0, 7))
    history.remove(0, 1, END)
    [row] = batch(history, (0, 8))
    assert (dict(row.sees), row.position) == ({0: 0, 3: 1}, 1)
    assert row.life == ((ROW, (0,)), (ROW, (3,)))


def test_what_is_removed_in_the_middle_was_seen_before():
    history = History()
    batch(history, (0, 5), (0, 6), (0, 7))
    history.remove(0, 1, 2)
    [row] = batch(history, (0, 8))
    assert (dict(row.sees), row.position) == ({0: 0, 2: 2, 3: 3}, 3)
    assert row.life == (*((ROW, (n,)) for n in range(3)), (REMOVED, (1, 2)), (ROW, (3,)))


def test_a_sequence_that_ends_leaves_nothing():
    history = History()
    batch(history, (0, 5), (0, 6))
    history.remove(0, 0, 1)
    history.remove(0, 0, END)
    [row] = batch(history, (0, 8))
    assert (dict(row.sees), row.life) == ({2: 0}, ((ROW, (2,)),))


def test_a_copy_goes_its_own_way():
    history = History()
    batch(history, (0, 5), (0, 6))
    history.copy(0, 1, 0, 1)
    first, second = batch(history, (0, 7), (1, 8))
    assert (dict(first.sees), dict(second.sees)) == ({0: 0, 1: 1, 2: 2}, {0: 0, 3: 1})
    assert rows(second.life) == [0, 3]


def test_a_shift_moves_a_sequence_alone():
    history = History()
    batch(history, (0, 5), (0, 6), (0, 7))
    history.copy(0, 1, 0, END)
    history.remove(0, 0, 1)
    history.shift(0, 1, END, -1)
    first, second = batch(history, (0, 8), (1, 9))
    assert dict(first.sees) == {1: 0, 2: 1, 3: 2}
    assert dict(second.sees) == {0: 0, 1: 1, 2: 2, 4: 3}
    assert first.life[3:5] == ((REMOVED, (0, 1)), (SHIFTED, (1, END, -1)))


def test_a_state_is_what_it_was_when_it_was_taken():
    history = History()
    batch(history, (0, 5), (0, 6))
    kept = history.of(0)
    batch(history, (0, 7))
    history.restore(kept, 2)
    [row] = batch(history, (2, 8))
    assert (dict(row.sees), rows(row.life)) == ({0: 0, 1: 1, 3: 2}, [0, 1, 3])


@pytest.mark.parametrize(
    ("window", "seen"),
    [(Window(), [0, 1, 2, 3, 4]), (Window(2), [3, 4]), (Window(3, chunked=True), [3, 4]), (Window(4, True), [4])],
)
def test_a_window_hides_what_is_too_far_back(window, seen):
    *_, last = batch(History(), *[(0, token) for token in range(5)])
    assert [*last.reaches(window)] == seen
