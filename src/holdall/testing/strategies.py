"""Hypothesis strategies for spaces of every kind, and for streams that behave like environments.

Hypothesis draws the structure and a seed. NumPy draws the bytes from the seed, so large observations cost Hypothesis no
more than small ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st

from holdall.schema import Tree
from holdall.space_leaves import stored_space
from holdall.testing.streams import DTYPES as DTYPES  # noqa: PLC0414  Tests import it from here, too.
from holdall.testing.streams import Content, LeafPlan, Mishaps, Padding, Stream

_CONTENTS: tuple[Content, ...] = ("noise", "table", "constant")
_PADDINGS: tuple[Padding, ...] = ("zero", "first", "fresh")
_WINDOWED: tuple[tuple[tuple[int, ...], int, int], ...] = (
    # Shape, axis of the window, number of elements that are new in every step.
    ((4, 36, 36), 0, 1),  # stack on the first axis
    ((36, 36, 4), 2, 1),  # stack on the last axis
    ((24, 20, 12), 2, 3),  # four frames of three channels
    ((3, 40, 40), 0, 1),
    ((4, 12, 12), 0, 1),  # a small window
    ((10, 10, 4), 2, 1),
    ((130, 3), 0, 1),  # short rows
    ((130, 41), 0, 1),  # longer rows
    ((500, 3), 0, 5),  # several rows a step
    ((64, 9, 8), 0, 1),
    ((300,), 0, 1),
    ((5000,), 0, 7),
    ((8, 4, 8), 1, 1),  # an axis in the middle
    ((4, 33, 4), 0, 1),  # two axes that could be the axis of the stack
    ((6, 32, 32), 0, 4),  # a window whose length is not a multiple of the step
    ((7,), 0, 1),
)
"""Large, medium and small shapes of observations that overlap from step to step."""


def box(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    """Return a Box with the bounds of the dtype."""
    return stored_space(shape, np.dtype(dtype))


dtypes: st.SearchStrategy[np.dtype[Any]] = st.sampled_from(DTYPES)

shapes: st.SearchStrategy[tuple[int, ...]] = st.one_of(
    st.just(()), st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), st.tuples(st.integers(1, 300))
)
"""Shapes of small arrays of any rank, including axes of length zero and one."""

boxes: st.SearchStrategy[spaces.Space[Any]] = st.builds(box, shapes, dtypes)

leaf_spaces: st.SearchStrategy[spaces.Space[Any]] = st.one_of(
    boxes,
    st.integers(1, 9).map(spaces.Discrete),
    st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 3), st.integers(1, 3))).map(spaces.MultiBinary),
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(spaces.MultiDiscrete),
)


def nested(leaves: st.SearchStrategy[spaces.Space[Any]], most: int = 4) -> st.SearchStrategy[spaces.Space[Any]]:
    """Nest spaces in Dict and Tuple spaces of up to `most` leaves, or leave them bare."""
    keys = st.sampled_from(["image", "state", "map", "a.b", "é"])
    return st.recursive(
        leaves,
        lambda children: st.one_of(
            st.dictionaries(keys, children, min_size=1, max_size=3).map(spaces.Dict),
            st.lists(children, min_size=1, max_size=3).map(spaces.Tuple),
        ),
        max_leaves=most,
    )


any_space: st.SearchStrategy[spaces.Space[Any]] = nested(leaf_spaces)


@st.composite
def leaf_plans(draw: st.DrawFn, shape: tuple[int, ...]) -> LeafPlan:
    """Draw the movement of a leaf of the given shape, usually along the axis of its window."""
    usual = [(axis, step) for known, axis, step in _WINDOWED if known == shape]
    sliding = [*usual * 3, *[(axis, 1) for axis, length in enumerate(shape) if length > 1]]
    movements = [(None, 1), *sliding] if sliding else [(None, 1)]

    def plan(later: LeafPlan | None) -> LeafPlan:
        axis, step = draw(st.sampled_from(movements[1:] if usual and later is None else movements))
        return LeafPlan(
            axis=axis,
            step=step,
            content=draw(st.sampled_from(_CONTENTS[:2] if later is None else _CONTENTS)),
            padding=draw(st.sampled_from(_PADDINGS)),
            repeats=draw(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.9])),
            later=later,
            later_from=draw(st.integers(1, 90)) if later is not None else 0,
        )

    first = plan(None)
    return plan(first) if draw(st.booleans()) else first


windowed_spaces: st.SearchStrategy[spaces.Space[Any]] = st.builds(
    lambda known, dtype: box(known[0], dtype),
    st.sampled_from(_WINDOWED),
    st.sampled_from([np.dtype("u1"), np.dtype("u1"), np.dtype("f4"), np.dtype("?"), np.dtype("f2")]),
)

mishaps: st.SearchStrategy[Mishaps] = st.builds(
    Mishaps,
    ends=st.sampled_from([0.0, 0.02, 0.02, 0.1, 0.5]),
    silent_resets=st.sampled_from([0.0, 0.0, 0.05]),
    skipped_steps=st.sampled_from([0.0, 0.0, 0.05]),
    foreign_next=st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.9]),
)


_several: st.SearchStrategy[spaces.Space[Any]] = st.dictionaries(
    st.sampled_from(["image", "history", "state"]), st.one_of(windowed_spaces, leaf_spaces), min_size=2, max_size=3
).map(spaces.Dict)


@st.composite
def streams(
    draw: st.DrawFn,
    observation_spaces: st.SearchStrategy[spaces.Space[Any]] | None = None,
    most_lanes: int = 5,
    most_bytes: int = 1 << 17,
) -> Stream:
    """Draw a stream: spaces, lanes, the movement of each leaf, and the probabilities of mishaps.

    Args:
        observation_spaces: By default spaces of every kind, windowed ones most often.
        most_bytes: Maximum bytes of one tick of observations, so that examples stay quick.
    """
    if observation_spaces is None:
        observation_spaces = draw(st.sampled_from([windowed_spaces, windowed_spaces, _several, any_space]))
    observation_space = draw(observation_spaces)
    leaves = Tree.of(observation_space, "observation_space").leaves
    observed_bytes = max(1, sum(leaf.nbytes for leaf in leaves))
    extras = draw(st.dictionaries(st.sampled_from(["log_prob", "goal"]), leaf_spaces, max_size=2))
    if draw(st.booleans()):
        extras["latent"] = box(draw(st.sampled_from([(), (1,), (3,), (9, 2)])), np.dtype("f4"))
    return Stream(
        observation_space,
        draw(draw(st.sampled_from([leaf_spaces, any_space]))),
        draw(st.integers(1, max(1, min(most_lanes, most_bytes // observed_bytes)))),
        plans=[draw(leaf_plans(leaf.shape)) for leaf in leaves],
        mishaps=draw(mishaps),
        extras=extras,
        reward_dtype=draw(st.sampled_from(["f4", "f8", "f2", "i8", "?"])),
        extra_values=draw(st.sampled_from(["any", "halves", "bits", "bits", "zeros"])),
        extra_breaks=draw(st.sampled_from([0.0, 0.0, 0.02, 0.2])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
