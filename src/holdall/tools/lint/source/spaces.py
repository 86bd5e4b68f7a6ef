"""Spaces: as programs construct them, as environments of known ids have them, and what wrappers make of them.

In:  the arguments of a constructor, an id, or environments with the full name of a wrapper and its arguments.
Out: a SpaceInfo, or environments. Ids are looked up in environments.json, which benchmarks/lint_environments.py makes
from the installed packages.
Invariant: a wrapper that is not described here makes the observation and the action unknown.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import resources
from math import prod
from typing import Any

import numpy as np

from holdall.errors import HoldallError
from holdall.schema import Leaf
from holdall.tools.lint.finding import SourceRange
from holdall.tools.lint.run import UNKNOWN, Environments, NotKnownError, Reference, SpaceInfo, known, whole
from holdall.tools.lint.source.arrays import dtype_of, shape_of, space_sample
from holdall.tools.lint.source.values import BoundMethod, CallArguments, TableValue, known_items, length_of, likely
from holdall.tools.plan.environments import parse_observation, parse_space
from holdall.tools.plan.spec import leaves_of

SPACES = {"Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple"}
UINT8, FLOAT32, _INT64 = np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.int64)
_LEAST_PICTURE = 4096  # bytes: beside a picture, the numbers of which the shape is not known are few
_MOST_VERSIONS = 8
_NOWHERE = SourceRange("", 0, 0, 0, 0)
_ALE = re.compile(r"^(?:ALE/)?(?P<game>[A-Za-z]+?)(?:-ram)?(?P<kind>NoFrameskip|Deterministic)?-v\d+$")
_CONSOLES = {
    "Genesis": "224x320", "Snes": "224x256", "Nes": "224x240", "Atari2600": "210x160",
    "GbAdvance": "160x240", "Sms": "192x256",
}  # fmt: skip
"""The screens of the games of retro, whose names end with the console's."""
_FAMILIES = {
    "MiniWorld-": "60x80x3:uint8 discrete(3)", "donkey-": "120x160x3:uint8 2", "Duckietown-": "480x640x3:uint8 2",
}  # fmt: skip
"""What all environments of a package show, by how their ids begin."""


def box(
    shape: tuple[int, ...], dtype: np.dtype[Any], place: SourceRange, *bounds: object, counts: tuple[int, ...] = ()
) -> SpaceInfo:
    """Return a space of one array; its bounds where they are known."""
    return SpaceInfo((Leaf("", shape, dtype),), False, place, {"": (bounds[0], bounds[1])} if bounds else {}, counts)


def discrete(count: int, place: SourceRange) -> SpaceInfo:
    """Return a space of one of so many numbers; 0: nobody knows how many."""
    return box((), _INT64, place, counts=(count,) if count else ())


def picture(shape: tuple[int, ...], place: SourceRange, *, scaled: bool = False) -> SpaceInfo:
    """Return a space of pictures: of bytes, or scaled to floats."""
    return box(shape, FLOAT32 if scaled else UINT8, place, 0, 1 if scaled else 255)


def atari_space(place: SourceRange, height: int = 84, width: int = 84) -> SpaceInfo:
    """Return what Stable-Baselines3's AtariWrapper gives: one grey frame."""
    return picture((height, width, 1), place)


def space_of(space: Any, argument: str, place: SourceRange) -> SpaceInfo | None:
    """Return a gymnasium space as leaves and bounds; None if Stable-Baselines3 cannot store it."""
    try:
        leaves = leaves_of(space, argument)
    except HoldallError:
        return None
    is_dict = hasattr(space, "spaces")
    children: dict[str, Any] = dict(space.spaces) if is_dict else {"": space}
    bounds = {
        name: (float(child.low.min()), float(child.high.max()))
        for name, child in children.items()
        if hasattr(child, "low") and hasattr(child, "high") and child.low.size
    }
    numbers = () if is_dict else np.atleast_1d(getattr(space, "n", getattr(space, "nvec", ())))
    return SpaceInfo(leaves, is_dict, place, bounds, tuple(map(int, numbers)))


# ------------------------------------------------------------ by id


@cache
def _known_environments() -> dict[str, tuple[str, int | None]]:
    """Return the spaces of known ids, as text, and their time limits."""
    text = resources.files("holdall.tools.lint").joinpath("environments.json").read_text(encoding="utf-8")
    table = json.loads(text)
    return {name: (pair, table["steps"].get(name)) for pair, names in table["spaces"].items() for name in names.split()}


def by_id(name: object) -> tuple[SpaceInfo | None, SpaceInfo | None, object]:
    """Return the spaces of a known environment, and its time limit."""
    found = _described(name.rpartition(":")[2]) if isinstance(name, str) else None
    if found is None:
        return None, None, UNKNOWN
    observation, _, action = found[0].rpartition(" ")
    texts = observation.split("+") if "=" in observation else [observation]
    try:
        seen = space_of(parse_observation(texts, "obs"), "obs", _NOWHERE)
        acted = space_of(parse_space(action, "action"), "action", _NOWHERE)
    except HoldallError:
        return None, None, UNKNOWN
    return seen, acted, UNKNOWN if found[1] is None else found[1]


def _described(name: str) -> tuple[str, int | None] | None:
    """Return the spaces of an id as text: its own, or those of a game, a console or a package that it names."""
    table = _known_environments()
    found = table.get(name)
    if found is None and (game := _ALE.match(name)):
        found = table.get(f"ALE/{game['game']}-v5") or table.get(f"{game['game']}NoFrameskip-v4")
        if found and "-ram" in name:
            found = ("128:uint8 " + found[0].rpartition(" ")[2], found[1])
    if found is None:  # other versions of a game show the same pictures
        title = name.rpartition("-v")[0]
        others = (table.get(f"{title}-v{version}") for version in range(_MOST_VERSIONS))
        found = next((one for one in others if one is not None and "x3:uint8" in one[0]), None)
    console = _CONSOLES.get(name.rpartition("-")[2].partition("@")[0].removesuffix("-v0"))
    if found is None and console is not None:
        found = (f"{console}x3:uint8 multibinary(12)", None)
    return found or next(((text, None) for start, text in _FAMILIES.items() if name.startswith(start)), None)


# ------------------------------------------------------------ by constructor


def make_space(interpreter: Any, kind: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Make a space of one of Gymnasium's classes; NotKnownError if something of it is not known."""
    place = interpreter.place_here(node)
    match kind:
        case "Box":
            return _box(arguments, place)
        case "Discrete":
            return discrete(whole(arguments.get(0, "n")) or 0, place)
        case "MultiBinary":
            return box(tuple(map(known, shape_of(arguments.get(0, "n")) or (None,))), np.dtype(np.int8), place)
        case "MultiDiscrete":
            given = arguments.get(0, "nvec")
            counts = tuple(whole(one) or 0 for one in known_items(given) or ())
            return box((known(length_of(given)),), _INT64, place, counts=counts)
        case "Dict":
            return _dict(arguments, place)
    return UNKNOWN


def _box(arguments: CallArguments, place: SourceRange) -> SpaceInfo:
    bounds = [arguments.get(at, name) for at, name in ((0, "low"), (1, "high"))]
    dtype = dtype_of(arguments.likely(3, "dtype", Reference("numpy.float32")))
    given = arguments.likely(2, "shape", None)
    bound = next((one for one in bounds if getattr(one, "shape", None) is not None), None) if given is None else None
    shape = shape_of(given) if bound is None else bound.shape
    axes = tuple(map(known, (None,) if shape is None else shape))
    if dtype is None or any(axis < 0 for axis in axes):
        raise NotKnownError
    return box(axes, dtype, place, *(one if isinstance(one, int | float) else UNKNOWN for one in bounds))


def _dict(arguments: CallArguments, place: SourceRange) -> SpaceInfo:
    given = arguments.get(0, "spaces", None)
    entries: dict[Any, Any] = {}
    if isinstance(given, TableValue) and given.is_complete:
        entries |= given
    elif given is not None:
        items = known_items(given)
        if items is None or not all(isinstance(one, tuple) and len(one) == 2 for one in items):
            raise NotKnownError
        entries |= dict(items)
    entries |= {name: value for name, value in arguments.named.items() if name not in {"spaces", "seed"}}
    children = {name: likely(child) for name, child in entries.items()}
    seen = {name: one for name, one in children.items() if one is not UNKNOWN}
    leaves = [Leaf(name, one.leaves[0].shape, one.leaves[0].dtype) for name, one in seen.items()
              if isinstance(one, SpaceInfo) and not one.is_dict]  # fmt: skip
    is_whole, is_named = len(seen) == len(children), all(isinstance(name, str) for name in children)
    is_known = bool(leaves) and len(leaves) == len(seen) and is_named and arguments.is_complete
    if not is_known or (not is_whole and max(leaf.nbytes for leaf in leaves) < _LEAST_PICTURE):
        raise NotKnownError
    bounds = {name: one.bounds[""] for name, one in seen.items() if one.bounds}
    return SpaceInfo(tuple(leaves), True, place, bounds, is_whole=is_whole)


def space_member(space: SpaceInfo, name: str) -> Any:
    """Return an attribute of a space."""
    if space.is_dict and name == "spaces":
        return TableValue((one.name, item(space, one.name)) for one in space.leaves)
    leaf = space.leaves[0] if space.leaves and not space.is_dict else None
    match name:
        case "shape" if leaf is not None:
            return leaf.shape
        case "dtype" if leaf is not None:
            return Reference(f"numpy.{leaf.dtype.name}")
        case "n" | "nvec" if leaf is not None:
            is_one = len(space.counts) == 1
            return (space.counts[0] if is_one else UNKNOWN) if name == "n" else space.counts or UNKNOWN
        case "low" | "high" if leaf is not None:
            return space_sample(replace(space, is_dict=False), name)
    return BoundMethod(space, name)


def item(base: Any, index: Any) -> Any:
    """Return `space[key]`: one of the spaces of a Dict."""
    is_dict = isinstance(base, SpaceInfo) and base.is_dict and isinstance(index, str)
    leaf = next((one for one in base.leaves if one.name == index), None) if is_dict else None
    return UNKNOWN if leaf is None else box(leaf.shape, leaf.dtype, base.place, *base.bounds.get(index, ()))


# ------------------------------------------------------------ wrappers

_SAME = frozenset({
    "VecCheckNan", "VecTransposeImage", "PyTorchObs", "OrderEnforcing", "PassiveEnvChecker", "EnvCompatibility",
    "StepAPICompatibility", "VecExtractDictObs", "NumpyToTorch", "MaxAndSkipObservation", "Wrapper",
    "ObservationWrapper", "VecEnvWrapper", "GymToGymnasium", "GymV21CompatibilityV0", "VectorEnvWrapper",
    "VectorEnvNormObs", "TFPyEnvironment",
})  # fmt: skip
# Wrappers that are about something else than observations say so in their names.
_ABOUT_OTHERS = re.compile(
    r"Reward|Action|Skip|Repeat|Noop|Life|Monitor|Record|Video|Seed|Log|Render|Statistic|Reset|TimeLimit|Sticky|Clip"
    r"|Mask|Episod|Terminat|Trunc|Penalty|Info|Safe|Delay"
)
_ABOUT_OBSERVATIONS = re.compile(r"Obs|Stack|Resize|Gr[ae]y|Image|Pixel|Flatten|Feature|History|Dict|Crop|Warp|Aware")
_NEW_ACTIONS = frozenset({"JoypadSpace", "DiscretizedAction", "MultiBinaryToDiscrete"})
_SAME_ACTIONS = frozenset({
    "ClipAction", "RescaleAction", "StickyAction", "StickyActionEnv", "ActionMasker", "RepeatAction", "ActionWrapper",
    "RandomizeAction", "NormalizeActionSpace",
})  # fmt: skip
_VERSION = re.compile(r"V\d$|_v\d+$")  # of the wrappers that Gymnasium once called experimental, and of SuperSuit's
_GRID = re.compile(r"-(\d+)x(\d+)-")
ATARI_WRAPPERS = frozenset({"wrap_deepmind", "make_atari"})

Change = Callable[[Environments, CallArguments, SourceRange], Environments]


def wrapped(env: Environments, dotted: str, arguments: CallArguments, place: SourceRange) -> Environments:
    """Return what a wrapper makes of environments."""
    last = _VERSION.sub("", dotted.rpartition(".")[2])
    named = {name: likely(one) for name, one in arguments.named.items()}
    given = replace(arguments, values=[likely(one) for one in arguments.values], named=named)
    is_suit = dotted.startswith("supersuit.")
    if last in _SAME:
        return env
    if last in _NEW_ACTIONS:
        actions = known_items(given.get(1, "actions"))
        return replace(env, action=discrete(len(actions), place) if actions else None)
    if last == "TimeLimit":
        return replace(env, episode_steps=given.get(1, "max_episode_steps"))
    if change := (_SUITS if is_suit else _CHANGES).get(last):
        try:
            return replace(change(env, given, place), place=env.place)
        except NotKnownError:
            return replace(env, observation=None)
    if not is_suit and (not _ABOUT_OTHERS.search(last) or _ABOUT_OBSERVATIONS.search(last)):
        return replace(env, observation=None, action=None)
    return replace(env, action=None) if "Action" in last and last not in _SAME_ACTIONS else env


def changed(env: Environments, change: Callable[[Leaf], Leaf | None], stack: int = 1) -> Environments:
    """Change every leaf of the observation; one that cannot be changed makes it unknown."""
    if env.observation is not None:
        leaves = [change(leaf) for leaf in env.observation.leaves]
        kept = tuple(leaf for leaf in leaves if leaf is not None)
        env = replace(env, observation=replace(env.observation, leaves=kept) if len(kept) == len(leaves) else None)
    return replace(env, stack=env.stack * stack)


def shaped(leaf: Leaf, *shape: int) -> Leaf:
    """Return a leaf with another shape."""
    return replace(leaf, shape=shape)


def _stacked_last(leaf: Leaf, count: int) -> Leaf:
    flat = len(leaf.shape) == 2
    return shaped(leaf, *leaf.shape, count) if flat else shaped(leaf, *leaf.shape[:-1], leaf.shape[-1] * count)


def _sides(value: Any) -> tuple[int, int]:
    axes = [known(one) for one in shape_of(value) or (None,)]
    return axes[0], axes[-1]


def _atari(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    size = given.count(3, "screen_size", 84)
    return replace(env, observation=atari_space(place, size, size))


def _warp(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    width, height = given.count(1, "width", 84), given.count(2, "height", 84)
    return replace(env, observation=atari_space(place, height, width))


def _preprocessing(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    defaults = {"grayscale_obs": True, "grayscale_newaxis": False, "scale_obs": False}
    grey, axis, scaled = (given.get(None, name, default) for name, default in defaults.items())
    if not all(isinstance(one, bool) for one in (grey, axis, scaled)):
        raise NotKnownError
    channels = () if grey and not axis else (1,) if grey else (3,)
    shape = (*_sides(given.get(3, "screen_size", 84)), *channels)
    return replace(env, observation=picture(shape, place, scaled=scaled))


def _grey(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    kept = (1,) if given.get(1, "keep_dim", False) is True else ()
    return changed(env, lambda leaf: shaped(leaf, *leaf.shape[:2], *kept) if len(leaf.shape) == 3 else None)


def _resized(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    sides = _sides(given.get(1, "shape"))
    return changed(env, lambda leaf: shaped(leaf, *sides, *leaf.shape[2:]) if len(leaf.shape) >= 2 else None)


def _stacked_first(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    count = given.count(1, "num_stack stack_size k n_frames")
    return changed(env, lambda leaf: shaped(leaf, count, *leaf.shape), count)


def _vec_stacked(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    count, at = given.count(1, "n_stack"), 0 if given.get(2, "channels_order", None) == "first" else -1
    return changed(env, lambda leaf: widened(leaf, at, count), count)


def widened(leaf: Leaf, axis: int, count: int) -> Leaf | None:
    """Return a leaf of several values side by side along an axis; None if it has no axes."""
    axes = list(leaf.shape)
    if axes:
        axes[axis] *= count
    return shaped(leaf, *axes) if axes else None


def _normalized(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    """VecNormalize declares images as float32, and leaves other spaces as they are."""
    if given.get(2, "norm_obs", True) is False or env.observation is None:
        return env
    images = {leaf.name for leaf in env.observation.images}
    bounds = {name: pair for name, pair in env.observation.bounds.items() if name not in images}
    plain = replace(env, observation=replace(env.observation, bounds=bounds))
    return changed(plain, lambda leaf: replace(leaf, dtype=FLOAT32) if leaf.name in images else leaf)


def _flat(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    space = env.observation
    if space is None or any(leaf.dtype.kind == "i" and not leaf.shape for leaf in space.leaves):
        raise NotKnownError
    dtype = np.result_type(*(leaf.dtype for leaf in space.leaves))
    bounds = next(iter(space.bounds.values())) if len(space.bounds) == 1 else ()
    return replace(env, observation=box((sum(prod(leaf.shape) for leaf in space.leaves),), dtype, space.place, *bounds))


def _filtered(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    keys = known_items(given.get(1, "filter_keys")) or ()
    kept = tuple(leaf for leaf in env.observation.leaves if leaf.name in keys) if env.observation else ()
    return replace(env, observation=replace(env.observation, leaves=kept) if env.observation and kept else None)


def _floats(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    return changed(env, lambda leaf: replace(leaf, dtype=FLOAT32))


def _given_space(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    space = given.get(2, "observation_space", None)
    return replace(env, observation=space if isinstance(space, SpaceInfo) else None)


def _deepmind(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    stacks = given.get(None, "frame_stack", False)
    if stacks is UNKNOWN:
        raise NotKnownError
    count = (whole(stacks) or 1) if not isinstance(stacks, bool) else 4 if stacks else 1
    seen = picture((84, 84, max(count, 1)), place, scaled=given.get(None, "scale", False) is True)
    return replace(env, observation=seen, stack=count, is_lazy=count > 1)


def _pictured(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    """MiniGrid's wrappers that show pixels or the grid alone."""
    space = env.observation
    image = next((leaf for leaf in space.leaves if leaf.name == "image"), None) if space and space.is_dict else None
    if space is None or not space.is_dict:
        return env
    return replace(env, observation=None if image is None else box(image.shape, image.dtype, space.place, 0, 255))


def _tiled(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    """MiniGrid's wrapper that draws what the agent sees."""
    tile = given.number(1, "tile_size", 8)

    def drawn(leaf: Leaf) -> Leaf:
        return shaped(leaf, *(side * tile for side in leaf.shape[:2]), 3) if leaf.name == "image" else leaf

    return changed(env, drawn)


def _tiled_whole(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    """MiniGrid's wrapper that draws the grid, whose sides most ids name."""
    sides = _GRID.search(env.env_id)
    if sides is None:
        raise NotKnownError
    grid = (int(sides[2]), int(sides[1]))
    whole_grid = changed(env, lambda leaf: shaped(leaf, *grid) if leaf.name == "image" else leaf)
    return _tiled(whole_grid, given, place)


_CHANGES: dict[str, Change] = {
    "AtariWrapper": _atari, "WarpFrame": _warp, "AtariPreprocessing": _preprocessing, "wrap_deepmind": _deepmind,
    "GrayscaleObservation": _grey, "GrayScaleObservation": _grey, "ResizeObservation": _resized,
    "FrameStack": lambda *given: replace(_stacked_first(*given), is_lazy=True), "FrameStackObservation": _stacked_first,
    "FrameStack4": lambda env, *_: changed(env, lambda leaf: _stacked_last(leaf, 4), 4),  # TF-Agents'
    "VecFrameStack": _vec_stacked, "VecNormalize": _normalized, "FlattenObservation": _flat,
    "FilterObservation": _filtered, "NormalizeObservation": _floats, "CastObservationToFloat32": _floats,
    "TransformObservation": _given_space, "ImgObsWrapper": _pictured, "RGBImgPartialObsWrapper": _tiled,
    "RGBImgObsWrapper": _tiled_whole,
}  # fmt: skip


def _suit_stacked(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    count = whole(given.get(1, "stack_size", 4)) or 1
    return changed(env, lambda leaf: _stacked_last(leaf, count), count)


def _suit_resized(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    height, width = given.number(2, "y_size"), given.number(1, "x_size")
    return changed(env, lambda leaf: shaped(leaf, height, width, *leaf.shape[2:]))


def _suit_grey(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    keeps = given.get(1, "mode", "full") not in {"full", "B", "R", "G"}
    return env if keeps else changed(env, lambda leaf: shaped(leaf, *leaf.shape[:2]))


def _suit_joined(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    times, number = whole(given.get(1, "num_vec_envs", 1)), env.number
    return replace(env, count=UNKNOWN if times is None or number is None else times * number, vector="subproc")


def _not_seen(env: Environments, given: CallArguments, place: SourceRange) -> Environments:
    return replace(env, observation=None)


# What SuperSuit's functions make of environments of PettingZoo: `resize_v1` and the like.
_SUITS: dict[str, Change] = {
    "color_reduction": _suit_grey, "resize": _suit_resized, "frame_stack": _suit_stacked, "dtype": _floats,
    "normalize_obs": _floats, "flatten": _flat, "concat_vec_envs": _suit_joined, "observation_lambda": _not_seen,
    "delay_observations": _not_seen, "reshape": _not_seen,
}  # fmt: skip
