"""`DrawnRows`: rows between the store and the batch."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from holdall.delivery.drawn_rows import DrawnRows, list_arrays, map_arrays
from holdall.schema import Schema
from holdall.store.columns import Columns

OBSERVATION = spaces.Dict({"camera": spaces.Box(0, 255, (4, 4), np.uint8), "state": spaces.Box(-1, 1, (3,))})
EXTRAS = {"log_prob": spaces.Box(-9, 9, ()), "value": spaces.Box(-9, 9, ())}


def make_columns() -> Columns:
    return Columns(Schema.of(OBSERVATION, spaces.Discrete(3), EXTRAS, 1))


def test_joined_rows_have_the_order_of_the_outputs_that_were_split() -> None:
    columns = make_columns()
    arrays = [np.full(2, output) for output in columns.batch_outputs]
    rows = DrawnRows.split(columns, arrays)
    assert [array[0] for array in rows.next_obs] == list(columns.next_obs_outputs)
    assert [array[0] for array in rows.extras] == list(columns.extra_outputs)
    assert rows.reward[0] == columns.reward_output
    assert all(joined is array for joined, array in zip(rows.join(), arrays, strict=True))


def test_arrays_are_mapped_in_the_order_in_which_they_are_listed() -> None:
    columns = make_columns()
    rows = DrawnRows.split(columns, [np.full(2, output) for output in columns.batch_outputs])
    listed = iter(list_arrays(rows))
    mapped = map_arrays(rows, lambda array: (array, next(listed)))
    assert all(array is other for array, other in mapped.join())
    assert next(listed, None) is None


def test_a_field_without_arrays_stays_as_it_is() -> None:
    rows = DrawnRows([], (), [np.ones(1)], (), None, None, None)
    mapped = map_arrays(rows, lambda array: array + 1)
    assert mapped == DrawnRows([], (), [np.full(1, 2)], (), None, None, None)
    assert list_arrays(mapped) == [np.full(1, 2)]


def test_sequences_get_their_axes_in_every_array() -> None:
    columns = make_columns()
    shapes = [(6, 4, 4), (6, 3), (6,), (6,), (6,), (6,), (6, 4, 4), (6, 3), (6,), (6,)]
    rows = DrawnRows.split(columns, [np.zeros(shape) for shape in shapes])
    assert [array.shape for array in rows.reshape((2, 3)).join()] == [(2, 3, *shape[1:]) for shape in shapes]
