"""What wrappers of Gymnasium, Gym, Stable-Baselines3 and others make of the spaces of what they wrap.

In:  environments, the full name of a wrapper, its arguments.  Out: environments.
Invariant: a wrapper that is not described here makes the observation and the action unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from holdall.schema import Leaf
from holdall.tools.lint.finding import SourceRange
from holdall.tools.lint.run import UNKNOWN, Environments, SpaceInfo, whole
from holdall.tools.lint.source.arrays import shape_of
from holdall.tools.lint.source.values import known_items, likely

_UINT8 = np.dtype(np.uint8)
_FLOAT32 = np.dtype(np.float32)
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
_VERSION = re.compile(r"V\d$")  # of the wrappers that Gymnasium once called experimental
_GRID = re.compile(r"-(\d+)x(\d+)-")
_SUPERSUIT = re.compile(r"_v\d+$")
ATARI_WRAPPERS = frozenset({"wrap_deepmind", "make_atari"})

Change = Callable[[Environments, Any, SourceRange], Environments]


def wrapped(env: Environments, dotted: str, arguments: Any, place: SourceRange) -> Environments:
    """Return what a wrapper makes of environments."""
    last = _VERSION.sub("", dotted.rpartition(".")[2])
    arguments = replace(
        arguments,
        values=[likely(one) for one in arguments.values],
        named={name: likely(one) for name, one in arguments.named.items()},
    )
    if last in _SAME:
        return env
    if last in _NEW_ACTIONS:
        known = known_items(arguments.get(1, "actions"))
        return replace(env, action=_discrete(len(known), place) if known else None)
    if last == "TimeLimit":
        return replace(env, episode_steps=arguments.get(1, "max_episode_steps"))
    change = _CHANGES.get(last)
    if change is None:
        if not _ABOUT_OTHERS.search(last) or _ABOUT_OBSERVATIONS.search(last):
            return replace(env, observation=None, action=None)
        return replace(env, action=None) if "Action" in last and last not in _SAME_ACTIONS else env
    made = change(env, arguments, place)
    return replace(made, place=env.place)


def suited(env: Environments, name: str, arguments: Any) -> Environments:  # noqa: PLR0911  one case for each function
    """Return what one of SuperSuit's functions makes of environments of PettingZoo: `resize_v1` and the like."""
    match _SUPERSUIT.sub("", name):
        case "color_reduction":
            keeps = likely(arguments.get(1, "mode", "full")) not in {"full", "B", "R", "G"}
            return _changed(env, lambda leaf: replace(leaf, shape=leaf.shape if keeps else leaf.shape[:2]))
        case "resize":
            sides = [whole(likely(arguments.get(at, word))) for at, word in ((2, "y_size"), (1, "x_size"))]
            if None in sides:
                return replace(env, observation=None)
            height, width = sides[0] or 0, sides[1] or 0
            return _changed(env, lambda leaf: replace(leaf, shape=(height, width, *leaf.shape[2:])))
        case "frame_stack":
            count = whole(likely(arguments.get(1, "stack_size", 4))) or 1
            return replace(_changed(env, lambda leaf: _stacked_last(leaf, count)), stack=env.stack * count)
        case "dtype" | "normalize_obs":
            return _floats(env, arguments, SourceRange.whole(""))
        case "flatten":
            return _flat(env, arguments, SourceRange.whole(""))
        case "concat_vec_envs":
            times, number = whole(likely(arguments.get(1, "num_vec_envs", 1))), env.number
            both = UNKNOWN if times is None or number is None else times * number
            return replace(env, count=both, vector="subproc")
        case "observation_lambda" | "delay_observations" | "reshape":
            return replace(env, observation=None)
    return env


def _stacked_last(leaf: Leaf, count: int) -> Leaf:
    if len(leaf.shape) == 2:
        return replace(leaf, shape=(*leaf.shape, count))
    return replace(leaf, shape=(*leaf.shape[:-1], leaf.shape[-1] * count))


def _discrete(count: int, place: SourceRange) -> SpaceInfo:
    return SpaceInfo((Leaf("", (), np.dtype(np.int64)),), False, place, {}, (count,))


def _image(shape: tuple[int, ...], place: SourceRange, dtype: np.dtype[Any] = _UINT8) -> SpaceInfo:
    return SpaceInfo((Leaf("", shape, dtype),), False, place, {"": (0, 255) if dtype == _UINT8 else (0, 1)})


def atari_space(place: SourceRange, height: int = 84, width: int = 84) -> SpaceInfo:
    """Return what Stable-Baselines3's AtariWrapper gives: one grey frame."""
    return _image((height, width, 1), place)


def _changed(env: Environments, change: Callable[[Leaf], Leaf | None]) -> Environments:
    """Change every leaf of the observation; one that cannot be changed makes it unknown."""
    if env.observation is None:
        return env
    leaves = [change(leaf) for leaf in env.observation.leaves]
    known = tuple(leaf for leaf in leaves if leaf is not None)
    return replace(env, observation=replace(env.observation, leaves=known) if len(known) == len(leaves) else None)


def _atari(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    size = whole(arguments.get(3, "screen_size", 84))
    return replace(env, observation=atari_space(place, size, size) if size else None)


def _warp(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    width, height = whole(arguments.get(1, "width", 84)), whole(arguments.get(2, "height", 84))
    return replace(env, observation=atari_space(place, height, width) if width and height else None)


def _preprocessing(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    sides = shape_of(likely(arguments.get(3, "screen_size", 84)))
    numbers = [whole(one) for one in sides or ()]
    grey, axis, scaled = (arguments.get(None, name, default) for name, default in
                          (("grayscale_obs", True), ("grayscale_newaxis", False), ("scale_obs", False)))  # fmt: skip
    if not numbers or None in numbers or not all(isinstance(one, bool) for one in (grey, axis, scaled)):
        return replace(env, observation=None)
    height, width = (numbers[0] or 0, numbers[-1] or 0)
    channels = () if grey and not axis else (1,) if grey else (3,)
    return replace(env, observation=_image((height, width, *channels), place, _FLOAT32 if scaled else _UINT8))


def _grey(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    keeps = arguments.get(1, "keep_dim", False) is True
    return _changed(
        env,
        lambda leaf: replace(leaf, shape=leaf.shape[:2] + ((1,) if keeps else ())) if len(leaf.shape) == 3 else None,
    )


def _resized(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    given = shape_of(likely(arguments.get(1, "shape")))
    sides = [whole(one) for one in given or ()]
    if not sides or None in sides:
        return replace(env, observation=None)
    height, width = sides[0] or 0, sides[-1] or 0
    return _changed(
        env, lambda leaf: replace(leaf, shape=(height, width, *leaf.shape[2:])) if len(leaf.shape) >= 2 else None
    )


def _stacked_first(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    count = whole(
        next(
            (arguments.named[n] for n in ("num_stack", "stack_size", "k", "n_frames") if n in arguments.named),
            arguments.get(1, "num_stack"),
        )
    )
    if count is None or count < 1:
        return replace(env, observation=None)
    made = _changed(env, lambda leaf: replace(leaf, shape=(count, *leaf.shape)))
    return replace(made, stack=env.stack * count)


def _lazily_stacked(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    return replace(_stacked_first(env, arguments, place), is_lazy=True)


def _four(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    """TF-Agents' stack: along the channels, in an array of its own."""
    return replace(_changed(env, lambda leaf: _stacked_last(leaf, 4)), stack=env.stack * 4)


def _vec_stacked(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    count = whole(arguments.get(1, "n_stack"))
    if count is None or count < 1:
        return replace(env, observation=None)
    first = arguments.get(2, "channels_order", None) == "first"

    def wide(leaf: Leaf) -> Leaf | None:
        if not leaf.shape:
            return None
        axes = list(leaf.shape)
        axes[0 if first else -1] *= count
        return replace(leaf, shape=tuple(axes))

    return replace(_changed(env, wide), stack=env.stack * count)


def _normalized(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    """VecNormalize declares images as float32, and leaves other spaces as they are."""
    if arguments.get(2, "norm_obs", True) is False or env.observation is None:
        return env
    images = {leaf.name for leaf in env.observation.images}
    made = _changed(env, lambda leaf: Leaf(leaf.name, leaf.shape, _FLOAT32) if leaf.name in images else leaf)
    if made.observation is not None and images:
        bounds = {name: pair for name, pair in made.observation.bounds.items() if name not in images}
        made = replace(made, observation=replace(made.observation, bounds=bounds))
    return made


def _flat(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    if env.observation is None:
        return env
    space = env.observation
    if any(leaf.dtype.kind == "i" and not leaf.shape for leaf in space.leaves):
        return replace(env, observation=None)
    dtype = np.result_type(*(leaf.dtype for leaf in space.leaves))
    total = sum(prod(leaf.shape) for leaf in space.leaves)
    bounds = {"": next(iter(space.bounds.values()))} if len(space.bounds) == 1 else {}
    return replace(env, observation=SpaceInfo((Leaf("", (total,), dtype),), False, space.place, bounds))


def _filtered(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    keys = known_items(arguments.get(1, "filter_keys"))
    if env.observation is None or keys is None:
        return replace(env, observation=None)
    kept = tuple(leaf for leaf in env.observation.leaves if leaf.name in keys)
    return replace(env, observation=replace(env.observation, leaves=kept) if kept else None)


def _floats(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    return _changed(env, lambda leaf: Leaf(leaf.name, leaf.shape, _FLOAT32))


def _given_space(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    space = arguments.get(2, "observation_space", None)
    return replace(env, observation=space if isinstance(space, SpaceInfo) else None)


def _deepmind(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    stacks = arguments.get(None, "frame_stack", False)
    scaled = arguments.get(None, "scale", False) is True
    count = whole(stacks) if not isinstance(stacks, bool) else 4 if stacks else 1
    shape = (84, 84, count or 1) if (count or 1) > 1 else (84, 84, 1)
    made = replace(env, observation=_image(shape, place, _FLOAT32 if scaled else _UINT8), stack=count or 1)
    return replace(made, is_lazy=(count or 1) > 1) if stacks is not UNKNOWN else replace(env, observation=None)


def _pictured(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    """MiniGrid's wrappers that show pixels or the grid alone."""
    return env if env.observation is None or not env.observation.is_dict else _filtered_image(env)


def _filtered_image(env: Environments) -> Environments:
    space = env.observation
    if space is None:
        return env
    image = next((leaf for leaf in space.leaves if leaf.name == "image"), None)
    seen = None if image is None else SpaceInfo((replace(image, name=""),), False, space.place, {"": (0, 255)})
    return replace(env, observation=seen)


def _tiled(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    """MiniGrid's wrapper that draws what the agent sees."""
    tile = whole(arguments.get(1, "tile_size", 8))
    if tile is None:
        return replace(env, observation=None)
    return _changed(env, lambda leaf: _drawn(leaf, leaf.shape[:2], tile) if leaf.name == "image" else leaf)


def _tiled_whole(env: Environments, arguments: Any, place: SourceRange) -> Environments:
    """MiniGrid's wrapper that draws the grid, whose sides most ids name."""
    tile, sides = whole(arguments.get(1, "tile_size", 8)), _GRID.search(env.env_id)
    if tile is None or sides is None:
        return replace(env, observation=None)
    grid = (int(sides[2]), int(sides[1]))
    return _changed(env, lambda leaf: _drawn(leaf, grid, tile) if leaf.name == "image" else leaf)


def _drawn(leaf: Leaf, sides: tuple[int, ...], tile: int) -> Leaf:
    return replace(leaf, shape=(*(side * tile for side in sides), 3))


_CHANGES: dict[str, Change] = {
    "AtariWrapper": _atari, "WarpFrame": _warp, "AtariPreprocessing": _preprocessing, "wrap_deepmind": _deepmind,
    "GrayscaleObservation": _grey, "GrayScaleObservation": _grey, "ResizeObservation": _resized,
    "FrameStack": _lazily_stacked, "FrameStackObservation": _stacked_first, "VecFrameStack": _vec_stacked,
    "VecNormalize": _normalized, "FlattenObservation": _flat, "FilterObservation": _filtered,
    "NormalizeObservation": _floats, "FrameStack4": _four,
    "CastObservationToFloat32": _floats, "TransformObservation": _given_space, "ImgObsWrapper": _pictured,
    "RGBImgPartialObsWrapper": _tiled, "RGBImgObsWrapper": _tiled_whole,
}  # fmt: skip
