"""A space is split into leaves. Values are checked against the leaves and never changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from holdall import ArgumentError, SpaceError
from holdall.schema import Leaf, Schema, Tree, fit_flags, fit_reward
from holdall.testing import assert_same_bits, random_rows
from holdall.testing.strategies import DTYPES, any_space, box

LANES = (2,)


def make_tree(space: spaces.Space[Any]) -> Tree:
    return Tree.of(space, "observation_space")


# ---------------------------------------------------------------- spaces


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (4, 84, 84)], ids=str)
def test_a_box_of_any_dtype_and_shape_is_one_leaf(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """The leaf has the shape and dtype of the space, also if the shape has no axes or an empty one."""
    (leaf,) = make_tree(box(shape, dtype)).leaves
    assert (leaf.name, leaf.shape, leaf.dtype) == ("", shape, dtype)
    assert leaf.nbytes == np.zeros(shape, dtype).nbytes


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (spaces.Discrete(5), (), "i8"),
        (spaces.Discrete(5, start=-2), (), "i8"),
        (spaces.MultiBinary(3), (3,), "i1"),
        (spaces.MultiBinary([2, 3]), (2, 3), "i1"),
        (spaces.MultiDiscrete([3, 4]), (2,), "i8"),
        (spaces.MultiDiscrete(np.array([[3, 4], [5, 6]])), (2, 2), "i8"),
        (spaces.Discrete(5, dtype=np.int32), (), "i4"),
    ],
    ids=str,
)
def test_countable_spaces_are_one_leaf(space: spaces.Space[Any], shape: tuple[int, ...], dtype: str) -> None:
    """Discrete, MultiBinary and MultiDiscrete have the shape and dtype that their samples have."""
    (leaf,) = make_tree(space).leaves
    assert (leaf.shape, leaf.dtype) == (shape, np.dtype(dtype))


def test_nested_spaces_name_their_leaves_by_path() -> None:
    """A leaf's name is its path, with dots."""
    space = spaces.Dict(
        camera=spaces.Dict(left=box((2,), "u1"), right=box((2,), "u1")),
        pair=spaces.Tuple([spaces.Discrete(3), box((), "f4")]),
    )
    assert [leaf.name for leaf in make_tree(space).leaves] == ["camera.left", "camera.right", "pair.0", "pair.1"]


@pytest.mark.parametrize("empty", [spaces.Dict({}), spaces.Tuple([])], ids=str)
def test_an_empty_dict_or_tuple_has_no_leaves_and_comes_back_empty(empty: spaces.Space[Any]) -> None:
    taken = make_tree(empty)
    assert taken.leaves == ()
    assert taken.build([]) == type(empty.sample())()


@given(space=any_space, seed=st.integers(0, 2**32 - 1))
def test_flatten_and_build_are_each_others_inverse(space: spaces.Space[Any], seed: int) -> None:
    """Building a value from its flattened arrays gives the value, for every space."""
    taken = make_tree(space)
    generator = np.random.default_rng(seed)
    value = taken.build([random_rows(leaf, LANES, generator) for leaf in taken.leaves])
    assert_same_bits(taken.build(taken.flatten(value, LANES, "obs")), value)


@given(space=any_space, seed=st.integers(0, 2**16))
def test_samples_of_a_space_fit_it(space: spaces.Space[Any], seed: int) -> None:
    """Samples are batched as a vector environment batches them."""
    space.seed(seed)
    taken = make_tree(space)
    one = taken.flatten(_with_lane(space.sample()), (1,), "obs")
    assert [array.shape[1:] for array in one] == [leaf.shape for leaf in taken.leaves]


def _with_lane(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lane(child) for key, child in value.items()}
    if isinstance(value, tuple):
        return tuple(_with_lane(child) for child in value)
    return np.asarray(value)[None]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(3),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.OneOf([spaces.Discrete(2)]),
    ],
    ids=lambda space: type(space).__name__,
)
def test_spaces_without_fixed_arrays_are_refused(space: spaces.Space[Any]) -> None:
    """The refusal names the argument, the path in it, the kind of space, the rule and the remedy."""
    with pytest.raises(SpaceError) as refusal:
        make_tree(spaces.Dict(a=spaces.Tuple([box((1,), "f4"), space])))
    message = str(refusal.value)
    assert message.startswith(f"observation_space['a.1'] is a {type(space).__name__}")
    assert "holdall stores Box, Discrete, MultiBinary, MultiDiscrete, Dict and Tuple" in message
    assert "Encode it as one of these" in message


OTHER_ORDER = [np.dtype(text).newbyteorder() for text in ("u2", "i4", "i8", "f2", "f4", "f8")]


@pytest.mark.parametrize("dtype", OTHER_ORDER, ids=str)
@pytest.mark.parametrize("argument", ["observation_space", "action_space", "extras"])
def test_spaces_in_the_byte_order_of_other_machines_are_refused(argument: str, dtype: np.dtype[Any]) -> None:
    """A checkpoint names no byte order, so the numbers would be read wrongly from it."""
    odd = spaces.Dict(z=spaces.Tuple([spaces.Box(0, 1, (3000,), dtype)]))
    spaces_of: dict[str, Any] = {
        "observation_space": spaces.Discrete(2),
        "action_space": spaces.Discrete(2),
        "extras": None,
    }
    spaces_of[argument] = {"x": odd} if argument == "extras" else odd
    where = "x.z.0" if argument == "extras" else "z.0"
    with pytest.raises(SpaceError, match=rf"^{argument}\['{where}'\] has dtype {dtype}, .*np\.{dtype.name}\.$"):
        Schema.of(**spaces_of, num_envs=1)


@pytest.mark.parametrize("dtype", OTHER_ORDER, ids=str)
def test_values_in_the_byte_order_of_other_machines_are_refused(dtype: np.dtype[Any]) -> None:
    """The rule holds for leaves, and for the first rewards, which decide the dtype of all later ones."""
    with pytest.raises(ArgumentError, match=f"^obs has dtype {dtype}"):
        Leaf("", (3,), dtype.newbyteorder("=")).fit(np.ones((2, 3), dtype), LANES, "obs")
    for first in (None, dtype.newbyteorder("=")):
        with pytest.raises(ArgumentError, match=f"^reward has dtype {dtype}"):
            fit_reward(np.ones(2, dtype), LANES, first)


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        ("c8", "Store the real and the imaginary part in a last axis of two"),
        ("O", "Use a bool, integer or floating point"),
    ],
)
def test_dtypes_that_cannot_be_stored_are_refused(dtype: str, remedy: str) -> None:
    """The refusal of complex numbers and objects has a remedy."""
    space = box((2,), "f4")
    space.dtype = np.dtype(dtype)  # Gymnasium refuses this dtype at construction, but not in a subclass.
    with pytest.raises(SpaceError, match=rf"^observation_space\['z'\] has dtype {space.dtype}, .*\. {remedy}"):
        make_tree(spaces.Dict(z=space))


def test_a_space_without_shape_is_refused() -> None:
    """Only arrays of a fixed shape can be stored."""
    space: Any = box((2,), "f4")
    space._shape = None
    with pytest.raises(SpaceError, match=r"^action_space needs a fixed shape and dtype\. Make the space with both"):
        Tree.of(space, "action_space")


@pytest.mark.parametrize("extras", [[1], {"a": 1}, "x"], ids=str)
def test_extras_that_are_not_a_mapping_of_spaces_are_refused(extras: Any) -> None:
    """The refusal shows the given value and says what to pass."""
    with pytest.raises(SpaceError, match=r"^extras \(.*\) must map names to spaces; pass a dict of gymnasium spaces"):
        Schema.of(spaces.Discrete(2), spaces.Discrete(2), extras, 1)


# ---------------------------------------------------------------- values


def catch_refusal(value: Any, space: spaces.Space[Any], leading: tuple[int, ...] = LANES) -> str:
    with pytest.raises(ArgumentError) as refusal:
        make_tree(space).flatten(value, leading, "obs")
    return str(refusal.value)


def test_a_wrong_dtype_names_both_and_how_to_pass_the_right_one() -> None:
    """Values are never cast, even if the cast would change none of them."""
    message = catch_refusal({"k": np.zeros((2, 3), "f8")}, spaces.Dict(k=box((3,), "f4")))
    assert message.startswith("obs['k'] has dtype float64, but the space has dtype float32")
    assert "holdall never casts. Pass np.asarray(value, dtype=np.float32)." in message


@pytest.mark.parametrize(
    ("value", "stored", "advice"),
    [
        (
            np.full((2, 3), 0.5, "f4"),
            "u1",
            "declare the space with dtype float32, or pass values of dtype uint8. For an",
        ),
        (np.full((2, 3), 0.5, "f8"), "i8", "declare the space with dtype float64, or pass values of dtype int64."),
        (np.full((2, 3), 300), "u1", "Not all values fit into uint8, so declare the space with dtype int64."),
    ],
)
def test_a_cast_that_would_change_values_is_not_advised(value: Any, stored: str, advice: str) -> None:
    """For example, `np.asarray(value, dtype=np.uint8)` turns an image from 0 to 1 into zeros."""
    message = catch_refusal(value, box((3,), stored))
    assert advice in message
    assert "np.asarray" not in message


@pytest.mark.parametrize(
    ("given", "space", "axes"),
    [((2, 8, 9, 3), (3, 8, 9), "-1, -3"), ((2, 3, 8, 9), (8, 9, 3), "-3, -1"), ((8, 9, 3), (3, 8, 9), "-1, -3")],
)
def test_channels_in_the_other_place_are_named_with_the_call_that_moves_them(
    given: tuple[int, ...], space: tuple[int, ...], axes: str
) -> None:
    value = np.zeros(given, "u1")
    assert catch_refusal(value, box(space, "u1")).endswith(f"so pass np.moveaxis(value, {axes})")
    moved = np.moveaxis(value, *map(int, axes.split(", ")))
    assert moved.shape[-3:] == space


def test_the_other_byte_order_is_another_dtype() -> None:
    """Bytes are stored as they are, so values in a swapped byte order are refused."""
    assert "has dtype >f4, but the space has dtype float32" in catch_refusal(np.zeros((2, 3), ">f4"), box((3,), "f4"))


@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 4), (2, 3, 1), (1, 3), (2, 0)], ids=str)
def test_a_wrong_shape_names_it_the_expected_one_and_its_axes(shape: tuple[int, ...]) -> None:
    """Values are never broadcast, reshaped or cut."""
    message = catch_refusal(np.zeros(shape, "f4"), box((3,), "f4"))
    assert message.startswith(f"obs has shape {shape}, expected (2, 3): num_envs=2 lanes then the space's (3,)")
    assert "pass an array of that shape" in message


def test_a_wrong_shape_in_extend_names_the_time_axis() -> None:
    """With two leading axes the refusal says which is which."""
    message = catch_refusal(np.zeros((5, 3), "f4"), box((3,), "f4"), (5, 2))
    assert "expected (5, 2, 3): 5 steps of num_envs=2 lanes then the space's (3,)" in message


def test_missing_and_unknown_keys_are_named() -> None:
    """A misspelt key shows up twice: as unknown and as missing."""
    space = spaces.Dict(outer=spaces.Dict(image=box((3,), "f4"), state=box((3,), "f4")))
    message = catch_refusal({"outer": {"imgae": 0, "state": 0}}, space)
    assert message.startswith("obs['outer'] has the keys ['imgae', 'state'], the space has ['image', 'state']")
    assert "missing ['image'], unknown ['imgae']; pass exactly the space's keys" in message


def test_an_array_for_a_dict_space_is_refused() -> None:
    """The refusal names the kind of value and the keys to pass."""
    message = catch_refusal(np.zeros(3), spaces.Dict(k=box((3,), "f4")))
    assert message == "obs is a ndarray, the space is a Dict; pass a mapping with the keys ['k']"


@pytest.mark.parametrize("value", [np.zeros((2, 2)), (np.zeros(2),), {"0": 1}], ids=["array", "too short", "dict"])
def test_a_value_for_a_tuple_space_is_a_tuple_of_its_length(value: Any) -> None:
    """The refusal names the kind of value and the number of values to pass."""
    message = catch_refusal(value, spaces.Tuple([box((), "f8"), box((), "f8")]))
    assert message.startswith(f"obs is a {type(value).__name__}, the space is a Tuple of 2")
    assert "pass a tuple of 2 batched values" in message


@pytest.mark.parametrize("value", [[[1.0], [1.0, 2.0]], None, object()], ids=["ragged", "None", "object"])
def test_values_that_are_not_arrays_are_refused(value: Any) -> None:
    """Ragged lists and objects are refused before NumPy could make an object array of them."""
    message = catch_refusal(value, box((3,), "f4"))
    assert message.startswith(f"obs is a {type(value).__name__}")
    assert "; pass " in message


def test_a_tensor_that_needs_gradients_is_refused_with_torchs_own_reason() -> None:
    """The message contains torch's message, and the error has torch's error as its cause."""
    with pytest.raises(ArgumentError, match=r"^obs is a Tensor .*detach.*; pass an array on the CPU") as refusal:
        make_tree(box((3,), "f4")).flatten(torch.zeros((2, 3), requires_grad=True), LANES, "obs")
    assert isinstance(refusal.value.__cause__, RuntimeError)


def test_lists_and_tensors_of_the_right_dtype_are_accepted() -> None:
    """A value is accepted if NumPy reads it as an array of the right shape and dtype."""
    (actions,) = make_tree(spaces.Discrete(3)).flatten([1, 2], LANES, "action")
    assert actions.tolist() == [1, 2]
    (rows,) = make_tree(box((3,), "f4")).flatten(torch.ones((2, 3)), LANES, "obs")
    assert rows.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_values_outside_the_bounds_are_accepted() -> None:
    """Values are not checked against the bounds of their space."""
    value = np.full((2, 1), 1e9, "f4")
    (rows,) = make_tree(spaces.Box(0, 1, (1,), np.float32)).flatten(value, LANES, "obs")
    assert rows.tolist() == value.tolist()


def test_an_array_that_fits_is_not_copied() -> None:
    """`flatten` returns the array that it was given."""
    value = np.zeros((2, 3), "f4")
    (array,) = make_tree(box((3,), "f4")).flatten(value, LANES, "obs")
    assert array is value


@pytest.mark.parametrize("value", [np.zeros(2), np.zeros(2, "i8"), [0, 1], np.zeros(2, "u1")], ids=str)
def test_flags_are_bool_and_nothing_else(value: Any) -> None:
    """Zeros and ones are refused, and the message says how to pass them."""
    with pytest.raises(ArgumentError, match=r"^terminated has dtype .*, flags are bool; pass np.asarray"):
        fit_flags(value, LANES, "terminated")


def test_flags_of_a_wrong_shape_are_refused() -> None:
    """There is one flag for each lane, in one axis."""
    with pytest.raises(ArgumentError, match=r"^valid has shape \(2, 1\), expected \(2,\): num_envs=2 lanes; pass"):
        fit_flags(np.zeros((2, 1), np.bool_), LANES, "valid")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "u1", "?"])
def test_the_first_reward_may_have_any_real_dtype(dtype: str) -> None:
    """The dtype is the environment's choice."""
    assert fit_reward(np.zeros(2, dtype), LANES, None).dtype == np.dtype(dtype)


@pytest.mark.parametrize("value", [np.zeros(2, "c8"), ["a", "b"], np.zeros(2, "M8[s]")], ids=str)
def test_rewards_that_are_not_real_numbers_are_refused(value: Any) -> None:
    """The refusal names the dtype, the rule and a dtype to use."""
    with pytest.raises(
        ArgumentError, match=r"^reward has dtype .*; rewards are bool, integer or .*, so pass np.asarray"
    ):
        fit_reward(value, LANES, None)


def test_later_rewards_keep_the_dtype_of_the_first() -> None:
    """The refusal names both dtypes and how to pass the right one."""
    with pytest.raises(
        ArgumentError, match=r"^reward has dtype float64, but the first add had dtype float32\. .*np.float32\)"
    ):
        fit_reward(np.zeros(2), LANES, np.dtype("f4"))
    with pytest.raises(
        ArgumentError, match=r"^reward has dtype float64, but .* pass rewards of dtype float64 from the"
    ):
        fit_reward(np.full(2, 0.5), LANES, np.dtype("i8"))


def test_rewards_of_a_wrong_shape_are_refused() -> None:
    """There is one reward for each lane, in one axis."""
    with pytest.raises(ArgumentError, match=r"^reward has shape \(2, 1\), expected \(2,\): num_envs=2 lanes; pass"):
        fit_reward(np.zeros((2, 1)), LANES, None)


def test_a_refusal_of_a_leaf_names_its_path() -> None:
    """In a nested space, the argument's name alone would not say which array is wrong."""
    with pytest.raises(ArgumentError, match=r"^extras\['goal.x'\] has shape"):
        Leaf("goal.x", (), np.dtype("f4")).fit(np.zeros((2, 1), "f4"), LANES, "extras")
