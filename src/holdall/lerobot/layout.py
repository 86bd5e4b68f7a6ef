"""TransitionLayout: the fields of a memory in which LeRobot's transitions are stored.

The first transition sets the keys and shapes. An image key has three fields: 8-bit words, float32 values, and the
`ImageForm` that says which of these two has the image. The unused field is all zeros, which a memory stores once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.lerobot.images import EncodedImage, ImageEncoder
from holdall.schema import Schema
from holdall.space_leaves import stored_space
from holdall.store.columns import Columns
from holdall.store.view import View

IMAGE_PREFIX = "observation.image"
"""Keys that start with this prefix are images, which LeRobot augments."""

Array = NDArray[Any]
Ids = NDArray[np.int64]
Shapes = dict[str, tuple[int, ...]]
_FLOAT32 = np.dtype(np.float32)
_UINT8 = np.dtype(np.uint8)


class StoredRows(NamedTuple):
    """All fields of some transitions, except for the images."""

    states: dict[str, Array]
    next_states: dict[str, Array]
    forms: dict[str, NDArray[np.uint8]]  # By image key: (2, rows) forms of the states and of the next states.
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    complementary: dict[str, Array]


class TransitionLayout:
    """The fields of one buffer, and the conversion of transitions to them. `make_step` is not thread-safe.

    Attributes:
        states: Shapes of all keys of a state, in the order of the first state.
        action: Shape of an action.
        complementary: Shapes of the complementary info.
        schema: Spaces of the memory.
        images: Keys of states that are images.
        vectors: The other keys of states.
    """

    def __init__(self, states: Shapes, action: tuple[int, ...], complementary: Shapes, *, is_lossy: bool) -> None:
        self.states = states
        self.action = action
        self.complementary = complementary
        self.images = [key for key in states if key.startswith(IMAGE_PREFIX)]
        self.vectors = [key for key in states if key not in self.images]
        self.schema = self._make_schema()
        self._columns = Columns(self.schema)
        self._leaves = {leaf.name: number for number, leaf in enumerate(self.schema.observation.leaves)}
        self._extras = {leaf.name: number for number, leaf in enumerate(self.schema.extras.leaves)}
        self._encoders = {key: ImageEncoder(states[key], is_lossy=is_lossy) for key in self.images}

    @classmethod
    def of(cls, state: Any, action: Any, complementary: Any, *, is_lossy: bool) -> Self:
        """Return the layout for transitions with the keys and shapes of this transition."""
        if not isinstance(state, Mapping) or not state:
            raise ArgumentError(
                f"state is {_describe(state)}. Pass a dict of tensors, such as {{'observation.state': ...}}."
            )
        states = {key: as_floats(value, f"state[{key!r}]").shape for key, value in state.items()}
        info = {
            key: as_floats(value, f"complementary_info[{key!r}]").shape for key, value in (complementary or {}).items()
        }
        return cls(states, as_floats(action, "action").shape, info, is_lossy=is_lossy)

    def _make_schema(self) -> Schema:
        fields: dict[str, spaces.Space[Any]] = {key: stored_space(self.states[key], _FLOAT32) for key in self.vectors}
        for key in self.images:
            fields[f"{key}/words"] = stored_space(self.states[key], _UINT8)
            fields[f"{key}/floats"] = stored_space(self.states[key], _FLOAT32)
            fields[f"{key}/form"] = stored_space((), _UINT8)
        extras = {key: stored_space(shape, _FLOAT32) for key, shape in self.complementary.items()}
        return Schema.of(spaces.Dict(fields), stored_space(self.action, _FLOAT32), extras, 1)

    # ---------------------------------------------------------------- descriptions in checkpoints

    def describe(self) -> dict[str, Any]:
        """Return the layout as JSON."""
        return {
            "states": {key: list(shape) for key, shape in self.states.items()},
            "action": list(self.action),
            "complementary": {key: list(shape) for key, shape in self.complementary.items()},
        }

    @classmethod
    def from_description(cls, described: Any, *, is_lossy: bool) -> Self:
        """Return the layout from the result of `describe`."""
        states = {key: tuple(shape) for key, shape in described["states"].items()}
        complementary = {key: tuple(shape) for key, shape in described["complementary"].items()}
        return cls(states, tuple(described["action"]), complementary, is_lossy=is_lossy)

    # ---------------------------------------------------------------- writing

    def make_step(
        self,
        state: Any,
        action: Any,
        reward: Any,
        next_state: Any,
        done: bool,
        truncated: bool,
        complementary: Any,
    ) -> tuple[Any, ...]:
        """Return the arguments of `Store.append`. Raise ArgumentError if keys or shapes differ from the first ones."""
        return (
            self._make_observation(state, "state"),
            _fit(action, self.action, "action")[None],
            np.full(1, float(reward), np.float32),
            self._make_observation(next_state, "next_state"),
            np.array([done]),
            np.array([truncated]),
            self._make_extras(complementary),
        )

    def _make_observation(self, state: Any, argument: str) -> dict[str, Array]:
        _require_keys(state, self.states, argument)
        fields: dict[str, Array] = {}
        for key, shape in self.states.items():
            name = f"{argument}[{key!r}]"
            floats = _fit(state[key], shape, name)
            if key in self._encoders:
                image: EncodedImage = self._encoders[key].encode(floats, name)
                fields[f"{key}/words"] = image.words[None]
                fields[f"{key}/floats"] = image.floats[None]
                fields[f"{key}/form"] = np.array([image.form], np.uint8)
            else:
                fields[key] = floats[None]
        return fields

    def _make_extras(self, complementary: Any) -> dict[str, Array]:
        if not self.complementary:
            return {}
        _require_keys(complementary, self.complementary, "complementary_info")
        return {
            key: _fit(complementary[key], shape, f"complementary_info[{key!r}]")[None]
            for key, shape in self.complementary.items()
        }

    # ---------------------------------------------------------------- reading

    def read_rows(self, view: View, ids: Ids) -> StoredRows:
        """Return all fields of transitions, except for the images."""
        columns = self._columns
        leaves = [self._leaves[key] for key in self.vectors] + [self._leaves[f"{key}/form"] for key in self.images]
        outputs = (
            columns.action_outputs[0],
            columns.reward_output,
            columns.terminated_output,
            columns.truncated_output,
            *[columns.extra_outputs[self._extras[key]] for key in self.complementary],
            *[columns.obs_outputs[leaf] for leaf in leaves],
            *[columns.next_obs_outputs[leaf] for leaf in leaves],
        )
        action, reward, terminated, truncated, *others = view.read(ids, outputs)
        info = dict(zip(self.complementary, others[: len(self.complementary)], strict=True))
        observed = others[len(self.complementary) :]
        obs = observed[: len(leaves)]
        next_obs = observed[len(leaves) :]
        vectors = len(self.vectors)
        forms = zip(self.images, obs[vectors:], next_obs[vectors:], strict=True)
        return StoredRows(
            dict(zip(self.vectors, obs[:vectors], strict=True)),
            dict(zip(self.vectors, next_obs[:vectors], strict=True)),
            {key: np.stack([form, next_form]) for key, form, next_form in forms},
            action,
            reward,
            terminated,
            truncated,
            info,
        )

    def find_image_outputs(self, key: str, kind: str) -> tuple[int, int]:
        """Return the outputs of an image key's states and next states. `kind` is "words" or "floats"."""
        leaf = self._leaves[f"{key}/{kind}"]
        return self._columns.obs_outputs[leaf], self._columns.next_obs_outputs[leaf]

    def group_images(self) -> list[list[str]]:
        """Return the image keys in groups of the same shape."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for key in self.images:
            groups.setdefault(self.states[key], []).append(key)
        return list(groups.values())


def as_floats(value: Any, argument: str) -> NDArray[np.float32]:
    """Return a tensor, an array or a number as float32, without a leading axis of 1, as LeRobot stores it."""
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"{argument} is {_describe(value)}. Pass a tensor or a number.") from error
    array = tensor.squeeze(0).to("cpu", torch.float32).numpy()
    return np.ascontiguousarray(array).reshape(array.shape)


def _fit(value: Any, shape: tuple[int, ...], argument: str) -> NDArray[np.float32]:
    floats = as_floats(value, argument)
    if floats.shape != shape:
        raise ArgumentError(
            f"{argument} has shape {tuple(torch.as_tensor(value).shape)}, but the first transition had {shape}. Pass a "
            f"tensor of shape {shape} or {(1, *shape)}."
        )
    return floats


def _require_keys(given: Any, expected: Shapes, argument: str) -> None:
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{argument} is {_describe(given)}. Pass a dict with the keys {sorted(expected)}.")
    missing = sorted(expected.keys() - given.keys())
    if missing:
        raise ArgumentError(
            f"{argument} has the keys {sorted(map(str, given))} and lacks {missing}, which the first transition had. "
            "Pass these keys in every transition."
        )


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
