"""Recurrent states are told apart by the token that each comes after, wherever they are moved."""

from __future__ import annotations

from llamadiff.ext.state.history import History
from llamadiff.ext.state.states import NONE, STRANGE, States


def decoded(history, *sequences):
    ends = {sequence: history.end(sequence) for sequence in sequences}
    return history.decode([0] * len(sequences), [ends[sequence] for sequence in sequences], sequences)


def read(states, cells, rows, back=()):
    return [(wrong.row.sequence, wrong.found, wrong.right) for wrong in states.read(cells, rows, dict(back))]


def test_a_sequence_goes_on_with_what_it_came_to():
    history, states = History(), States()
    first = decoded(history, 0, 1)
    assert read(states, [0, 1], first) == []
    states.write(0, 2, first, now=1)
    after = decoded(history, 1, 0)
    assert read(states, [1, 0], after) == []
    assert read(states, [0, 1], after) == [(1, 0, 1), (0, 1, 0)]


def test_states_move_all_at_once():
    history, states = History(), States()
    states.write(0, 2, decoded(history, 0, 1), now=1)
    states.move(0, [1, 0])
    assert read(states, [1, 0], decoded(history, 0, 1)) == []


def test_a_new_sequence_begins_with_none():
    history, states = History(), States()
    states.write(0, 1, decoded(history, 0), now=1)
    assert read(states, [0], new := decoded(history, 1)) == [(1, 0, NONE)]
    states.clear(0, 1, now=2)
    assert read(states, [0], new) == []


def test_a_row_that_is_written_besides_is_no_state():
    history, states = History(), States()
    states.write(0, 2, decoded(history, 0), now=1)
    assert read(states, [1], decoded(history, 1)) == [(1, STRANGE, NONE)]


def test_a_state_that_was_brought_back_is_where_nothing_was_written_since():
    history, states = History(), States()
    states.write(0, 1, decoded(history, 0), now=1)
    history.restore(history.of(0), 1)
    rows = decoded(history, 1)
    assert read(states, [3], rows, {1: (0, 2)}.items()) == []
    states.clear(3, 1, now=3)
    assert read(states, [3], rows, {1: (0, 2)}.items()) == [(1, NONE, 0)]
