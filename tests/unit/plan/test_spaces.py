"""Spaces as text: a text becomes a space, or an error that says how to write one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.tools.plan.environments import (
    has_images,
    parse_observation,
    parse_space,
    space_from_dict,
    space_to_dict,
)


@pytest.mark.parametrize(
    ("text", "space"),
    [
        ("84x84x3:uint8", spaces.Box(0, 255, (84, 84, 3), np.uint8)),
        ("31", spaces.Box(-np.inf, np.inf, (31,), np.float32)),
        ("5:float64", spaces.Box(-np.inf, np.inf, (5,), np.float64)),
        ("discrete(4)", spaces.Discrete(4)),
        ("multibinary(6)", spaces.MultiBinary(6)),
        ("MultiDiscrete(3, 4)", spaces.MultiDiscrete([3, 4])),
    ],
)
def test_a_text_is_read_as_a_space(text: str, space: spaces.Space[Any]) -> None:
    assert parse_space(text, "obs") == space


@pytest.mark.parametrize(
    "text",
    [
        "",
        "84x",
        "x84",
        "4:float99",
        "4:object",
        "0x4",
        "discrete(0)",
        "discrete(4,5)",
        "box(3)",
        "-3",
        "9" * 30,
        "2147483648",
    ],
)
def test_a_text_without_a_valid_space_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="obs"):
        parse_space(text, "obs")


def test_named_spaces_become_a_dict() -> None:
    found = parse_observation(["image=84x84x3:uint8", "vector=31"])
    assert isinstance(found, spaces.Dict)
    assert {key: child.shape for key, child in found.spaces.items()} == {"image": (84, 84, 3), "vector": (31,)}


@pytest.mark.parametrize("texts", [[], ["3", "4"], ["a=3", "a=4"], ["=3", "b=2"]])
def test_several_spaces_without_names_of_their_own_are_refused(texts: list[str]) -> None:
    with pytest.raises(ArgumentError):
        parse_observation(texts)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (4, 5, 3), np.uint8),
        spaces.Box(-2.0, 3.5, (), np.float64),
        spaces.Discrete(5),
        spaces.MultiBinary([2, 3]),
        spaces.MultiDiscrete([2, 9]),
        spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(0, 1, (3,), np.float32)}),
    ],
)
def test_a_space_is_equal_after_it_was_sent_to_another_process(space: spaces.Space[Any]) -> None:
    assert space_from_dict(space_to_dict(space)) == space


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)})})])
def test_a_space_that_stable_baselines3_cannot_store_is_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(ArgumentError, match="cannot be stored"):
        space_to_dict(space)


def test_only_spaces_that_stable_baselines3_convolves_count_as_images() -> None:
    assert has_images(spaces.Dict({"v": spaces.Discrete(2), "i": spaces.Box(0, 255, (8, 9, 3), np.uint8)}))
    assert not has_images(spaces.Box(0, 1, (8, 9, 3), np.float32))
    assert not has_images(spaces.Box(0, 100, (8, 9, 3), np.uint8))
