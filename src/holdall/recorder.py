"""Recorder: steps environments and adds the true transitions to a memory, however the environments reset.

    step -> check actions -> reset lanes if needed -> envs.step -> find final observations -> memory.add

The environments are a Gymnasium vector environment, one environment, or a VecEnv of Stable-Baselines3.

Guarantee: a reset is never a transition, and `next_obs` is never the first observation of another episode. A call that
is refused steps nothing and adds nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.checks import require_count, to_whole
from holdall.environments import (
    DISABLED,
    NEXT_STEP,
    SAME_STEP,
    ReportedFinals,
    StepResult,
    make_source,
    parse_mode,
)
from holdall.errors import ArgumentError
from holdall.memory import ReplayMemory
from holdall.rollout import RolloutMemory
from holdall.schema import Array, Tree, fit_flags

Flags = NDArray[np.bool_]
Policy = Callable[[Any], Any]


class _Lanes(NamedTuple):
    """The lanes between two steps. Every step and every reset replaces this record in one assignment."""

    obs: Any  # The observations that the next step begins with, as the environment returned them.
    obs_leaves: list[Array]  # Copies of `obs`, leaf by leaf.
    ended: Flags  # Lanes whose episode ended and that were not reset since.
    running: Flags  # Lanes whose last transition did not end its episode.
    is_incomplete: bool = False  # Whether a later step or reset failed or was interrupted. All lanes must be reset.


class Recorder:
    """Steps environments, and adds the transitions to a memory.

    Args:
        envs: A Gymnasium vector environment, an environment of `gymnasium.make`, or a VecEnv of Stable-Baselines3.
        memory: A `ReplayMemory` or `RolloutMemory` of the same spaces and as many lanes.
        autoreset_mode: "next_step", "same_step" or "disabled", or a Gymnasium `AutoresetMode`. None:
            `envs.metadata["autoreset_mode"]`. Without that entry, the first end of an episode shows the mode: with
            `info["final_obs"]` it is "same_step", otherwise "next_step" is assumed, with a warning.

    The recorder resets lanes before it steps them: all of them at first, and with "disabled" those whose episodes
    ended. A policy acts on `recorder.obs`, which is always the observation that the next step begins with.

    Examples:
        >>> spaces = envs.single_observation_space, envs.single_action_space
        >>> target = holdall.ReplayMemory(*spaces, capacity=1_000, num_envs=2)
        >>> recorder = holdall.Recorder(envs, target)
        >>> for _ in range(5):
        ...     _ = recorder.step(envs.action_space.sample())
        >>> len(target)
        10
    """

    def __init__(self, envs: Any, memory: Any, *, autoreset_mode: Any = None) -> None:
        if not all(hasattr(memory, name) for name in ("add", "schema")):
            raise ArgumentError(
                f"memory ({type(memory).__name__}) cannot be recorded to; pass a ReplayMemory or a RolloutMemory"
            )
        self.envs = envs
        self.memory = memory
        self._schema = memory.schema
        self._lanes = memory.schema.num_envs
        self._source = make_source(envs)
        mode = self._source.mode if autoreset_mode is None else parse_mode(autoreset_mode, "autoreset_mode")
        if self._source.declares_mode and mode != self._source.mode:
            raise ArgumentError(
                f"autoreset_mode is {mode!r}, but {type(envs).__name__} says {self._source.mode!r}; leave it out, or "
                "correct envs.metadata['autoreset_mode'] if that is wrong"
            )
        self._mode = mode or NEXT_STEP
        self._is_mode_assumed = mode is None
        self._has_seen_end = False  # Whether an episode has ended while the mode was assumed.
        self._require_same_spaces()
        self._rollout = memory if isinstance(memory, RolloutMemory) else None
        self._state: _Lanes | None = None  # None before the first reset.
        self._reward_dtype: np.dtype[Any] | None = None  # Dtype of the last reward that was added. None: none was.
        self._is_checking_writers = isinstance(memory, ReplayMemory)  # Whether to warn if other code adds steps.
        self._expected_next_id: int | None = None  # The memory's next id if only this recorder adds. None: not known.

    @property
    def obs(self) -> Any:
        """The observations that the next step begins with. Lanes that need a reset are reset first."""
        return self._reset_where_needed().obs

    def step(self, actions: Any, extras: Mapping[str, Any] | None = None, **named: Any) -> Any:
        """Step the environments, add the transitions, and return what `envs.step` returned.

        Args:
            extras: Further fields of the step, by name. They may also be passed as keyword arguments. A
                `RolloutMemory` takes its `value` and `log_prob` from them.
        """
        if extras is not None and not isinstance(extras, Mapping):
            raise ArgumentError(f"extras ({extras!r}) must be a dict of fields by name; pass one, or name=value")
        action, others = self._fit_arguments(actions, named if extras is None else {**extras, **named})
        self._require_fresh_estimates()
        state = self._reset_where_needed()
        if self._is_checking_writers:
            self._check_writers(state.running)
        self._state = state._replace(is_incomplete=True)
        accepted_actions = self._source.convert_actions(self._schema.action, actions, action, state.obs)
        returned, result = self._source.step(accepted_actions)
        obs_after = self._flatten_observation(result.obs)
        terminated = fit_flags(result.terminated, (self._lanes,), "terminated")
        truncated = fit_flags(result.truncated, (self._lanes,), "truncated")
        ends = terminated | truncated
        has_ends = bool(np.count_nonzero(ends))
        valid = ~state.ended if self._mode == NEXT_STEP and np.count_nonzero(state.ended) else None
        if valid is not None:
            self._require_only_resets(result, ends, ~valid)
        if self._is_mode_assumed and has_ends:
            self._detect_mode(result)
        is_reset_by_step = has_ends and self._mode == SAME_STEP
        next_obs = self._insert_final_obs(obs_after, result.info, ends) if is_reset_by_step else obs_after
        reward = result.reward if result.reward.ndim > len(self._schema.reward_shape) else result.reward[None]
        self._write(state.obs_leaves, action, others, reward, terminated, truncated, next_obs, valid)
        self._state = _Lanes(
            obs=result.obs,
            obs_leaves=[np.array(leaf, order="C") for leaf in obs_after],
            ended=np.zeros_like(ends) if is_reset_by_step else ends,
            running=~ends if valid is None else ~ends & valid,
        )
        return returned

    def _require_fresh_estimates(self) -> None:
        """Raise ArgumentError if a lane must be reset before a step of a rollout.

        The value and the log_prob of the step are then those of an observation of the episode before.
        """
        if self._rollout is None:
            return
        stale = self._find_lanes_to_reset()
        if stale is not None:
            raise ArgumentError(
                f"lanes {_list_lanes(stale)} were not reset since their episode ended, so value and log_prob are not "
                "those of the observations that this step begins with. Compute them from recorder.obs, which resets, "
                "or call recorder.reset(options={'reset_mask': ...}) first."
            )

    def reset(self, *, seed: Any = None, options: Mapping[str, Any] | None = None) -> Any:
        """Reset all lanes, or those of `options["reset_mask"]`, and return what `envs.reset` returned.

        An episode that has not ended is cut: its transitions do not change, and no n-step return or sequence continues
        into the next one.
        """
        state = self._state
        mask = np.ones(self._lanes, np.bool_)
        if options is not None and "reset_mask" in options:
            mask = fit_flags(options["reset_mask"], (self._lanes,), "options['reset_mask']")
            if (state is None or state.is_incomplete) and not mask.all():
                raise ArgumentError(
                    f"options['reset_mask'] leaves out lanes {_list_lanes(~mask)}, whose observations are not known. "
                    "Reset all lanes first."
                )
        cut = self._find_cut_lanes(mask)
        if self._rollout is not None and cut.any() and len(self._rollout):
            raise ArgumentError(
                f"A reset would cut the episodes of lanes {_list_lanes(cut)} within a rollout, and their advantages "
                "would reach into other episodes. Call memory.reset() first, which begins a new rollout."
            )
        if state is not None:
            # If the environment raises, or the call is interrupted, some lanes may have been reset.
            self._state = state._replace(is_incomplete=True)
        returned, obs = self._source.reset(seed, None if options is None else dict(options))
        obs_leaves = [np.array(leaf, order="C") for leaf in self._flatten_observation(obs)]
        if state is not None and not mask.all():
            for leaf, before in zip(obs_leaves, state.obs_leaves, strict=True):
                leaf[~mask] = before[~mask]
            obs = self._schema.observation.build([leaf.copy() for leaf in obs_leaves])
        if self._rollout is None and cut.any():
            self._add_border(obs_leaves if state is None else state.obs_leaves, obs_leaves)
        none = np.zeros(self._lanes, np.bool_)
        self._state = _Lanes(
            obs=obs,
            obs_leaves=obs_leaves,
            ended=none if state is None else state.ended & ~mask,
            running=none if state is None else state.running & ~mask,
        )
        return returned

    def collect(self, policy: Policy, steps: float | None = None, *, progress: bool = True) -> int:
        """Step `steps` times with the actions of `policy`, and return the number of transitions.

        Args:
            policy: Gets `recorder.obs`, and returns actions, or actions and a dict of extras, or actions and None.
            steps: Steps of all lanes. None fills a RolloutMemory. 1e6 is a million.
            progress: Show a progress bar, if standard error is a terminal.
        """
        if not callable(policy):
            raise ArgumentError(
                f"policy ({policy!r}) must be a function of observations; pass one that returns actions"
            )
        if self._rollout is not None:
            room = round(self._rollout.num_steps * (1 - self._rollout.fill))
            steps = room if steps is None else steps
            if require_count("steps", to_whole(steps), 0) > room:
                raise ArgumentError(
                    f"steps ({steps}) is more than the {room} that the rollout has room for; pass {room} or fewer, or "
                    "call memory.reset() before"
                )
        count = require_count("steps", to_whole(steps), 0)
        shows_progress = progress and sys.stderr.isatty()
        transitions = 0
        for _ in _show_progress(count) if shows_progress else range(count):
            actions, extras = self._split_answer(policy(self.obs))
            transitions += self._lanes
            if self._mode == NEXT_STEP and self._state is not None:
                transitions -= int(np.count_nonzero(self._state.ended))  # The step only resets these lanes.
            self.step(actions, extras)
        return transitions

    def _fit_arguments(self, actions: Any, fields: dict[str, Any]) -> tuple[list[Array], dict[str, Any]]:
        """Check the arguments of a step. Return copies of the action's leaves, and the other arguments of `memory.add`.

        The environment may write to its arguments, so the memory gets copies.
        """
        schema = self._schema
        flatten = self._source.flatten
        others: dict[str, Any] = {}
        if self._rollout is not None:
            missing = [name for name in ("value", "log_prob") if fields.get(name) is None]
            if missing:
                raise ArgumentError(
                    f"{missing[0]} is missing: a RolloutMemory needs the policy's value and log_prob of every step; "
                    "pass recorder.step(actions, value=..., log_prob=...)"
                )
            others = {name: self._source.add_lane_axis(fields.pop(name)) for name in ("value", "log_prob")}
            if self._rollout.is_full:
                raise ArgumentError(
                    f"the rollout has all its num_steps ({self._rollout.num_steps}); call memory.finish, use its "
                    "minibatches, and call memory.reset() before the next step"
                )
        action = [np.array(leaf, order="C") for leaf in flatten(schema.action, actions, "actions")]
        if fields or schema.extras.leaves:
            extras = [np.array(leaf) for leaf in flatten(schema.extras, fields, "extras")]
            others["extras"] = schema.extras.build(extras)
        return action, others

    def _flatten_observation(self, obs: Any) -> list[Array]:
        """Return the leaves of an observation that an environment returned. Raise if they do not fit its space."""
        try:
            return self._source.flatten(self._schema.observation, obs, "obs")
        except ArgumentError as error:
            raise ArgumentError(
                f"envs returned an observation that does not fit its space: {error}. If such observations are right, "
                "set envs.observation_space to their space, and make the memory with that space."
            ) from error

    def _write(
        self,
        obs: list[Array],
        action: list[Array],
        others: dict[str, Any],
        reward: Array,
        terminated: Flags,
        truncated: Flags,
        next_obs: list[Array],
        valid: Flags | None,
    ) -> None:
        """Add a step to the memory."""
        schema = self._schema
        before = schema.observation.build(obs)
        actions = schema.action.build(action)
        following = schema.observation.build(next_obs)
        if valid is not None:
            others["valid"] = valid
        if self._rollout is not None:
            self._rollout.add(before, actions, reward, terminated, truncated, final_obs=following, **others)
        else:
            self.memory.add(before, actions, reward, following, terminated, truncated, **others)
        self._reward_dtype = reward.dtype

    def _add_border(self, obs: list[Array], obs_after: list[Array]) -> None:
        """Add a tick in which no lane made a transition, so that no episode before it continues after it."""
        schema = self._schema
        lanes = self._lanes
        dtype = self._reward_dtype
        if dtype is None:  # Other code, or an earlier process, added the transitions.
            rewards, _, _ = self.memory.store.view().outcomes(np.array([self.memory.next_id - lanes]))
            dtype = rewards.dtype
        all_false = np.zeros(lanes, np.bool_)
        self.memory.add(
            schema.observation.build(obs),
            schema.action.build(_make_zeros(schema.action, lanes)),
            np.zeros((lanes, *schema.reward_shape), dtype),
            schema.observation.build(obs_after),
            all_false,
            all_false,
            extras=schema.extras.build(_make_zeros(schema.extras, lanes)),
            valid=all_false,
        )
        self._expected_next_id = None

    def _check_writers(self, running: Flags) -> None:
        """Warn once if other code has added steps to the memory in the middle of the episodes of lanes `running`."""
        next_id = self.memory.next_id
        is_alone = self._expected_next_id is None or self._expected_next_id == next_id
        self._expected_next_id = next_id + self._lanes
        if not is_alone and running.any():
            self._is_checking_writers = False
            warnings.warn(
                "Steps were added to memory outside of this Recorder, in the middle of the episodes of lanes "
                f"{_list_lanes(running)}. N-step returns and sequences continue from one stream of steps into "
                "another. Record all environments with one Recorder, as a vector environment, or add elsewhere only "
                "after recorder.reset().",
                stacklevel=3,
            )

    def _find_cut_lanes(self, mask: Flags) -> Flags:
        """Return the lanes of `mask` whose newest transition does not end its episode."""
        if not isinstance(self.memory, ReplayMemory):
            state = self._state
            if state is None or self._reward_dtype is None:
                return np.zeros_like(mask)  # This recorder has added nothing that could be cut.
            return mask & (state.running | state.is_incomplete)
        cut = np.zeros(self._lanes, np.bool_)
        next_id = self.memory.next_id
        if next_id > 0:
            lanes = np.flatnonzero(mask)
            lanes = lanes[self.memory.are_valid(next_id - self._lanes + lanes)]
            _, terminated, truncated = self.memory.store.view().outcomes(next_id - self._lanes + lanes)
            cut[lanes] = ~(terminated | truncated)
        return cut

    def _find_lanes_to_reset(self) -> Flags | None:
        """Return the lanes that must be reset before they are stepped, or None if there are none."""
        state = self._state
        if state is None or state.is_incomplete:
            return np.ones(self._lanes, np.bool_)
        return state.ended.copy() if self._mode == DISABLED and np.count_nonzero(state.ended) else None

    def _reset_where_needed(self) -> _Lanes:
        """Reset the lanes that must be reset before the next step. Return all lanes as they are then."""
        lanes = self._find_lanes_to_reset()
        if lanes is not None:
            self.reset(options=None if lanes.all() else {"reset_mask": lanes})
        assert self._state is not None  # The first call resets all lanes.
        return self._state

    def _require_only_resets(self, result: StepResult, ends: Flags, resets: Flags) -> None:
        """Raise ArgumentError if an episode ends in a lane of `resets`, which next-step autoreset has just reset.

        A reward in such a lane is an error only if the mode is assumed, because a wrapper may add rewards.
        """
        if ends[resets].any() or (self._is_mode_assumed and np.any(result.reward[resets])):
            raise ArgumentError(
                f"lanes {_list_lanes(resets)} have a reward or an end in the step after the end of an episode, which "
                "is impossible with next-step autoreset. Pass autoreset_mode='same_step' or 'disabled' to Recorder, or "
                "correct envs.metadata['autoreset_mode'], and begin a new memory."
            )

    def _detect_mode(self, result: StepResult) -> None:
        """At the first end of an episode, find the autoreset mode of an environment that does not declare it."""
        if self._has_seen_end:
            return
        self._has_seen_end = True
        if ReportedFinals.find(result.info) is not None:
            self._mode = SAME_STEP
            self._is_mode_assumed = False
            return
        warnings.warn(
            "envs.metadata has no 'autoreset_mode', and info has no 'final_obs'. The step after the end of an episode "
            "is treated as a reset, which is Gymnasium's default. If that is right, pass autoreset_mode='next_step' to "
            "Recorder, otherwise 'disabled' or 'same_step'.",
            stacklevel=3,
        )

    def _insert_final_obs(self, obs: list[Array], info: Any, ends: Flags) -> list[Array]:
        """Return copies of observations, in which lanes whose episode ended have their true final observation."""
        finals = ReportedFinals.find(info)
        rows = [np.array(leaf, order="C") for leaf in obs]
        for lane in np.flatnonzero(ends):
            final_leaves = None if finals is None else finals.get_leaves(self._schema.observation, int(lane))
            if final_leaves is None:
                raise ArgumentError(
                    f"info has no 'final_obs' for lane {lane}, whose episode ended with same-step autoreset, so its "
                    "final observation is lost. Make the environment report it, or make the environment with "
                    "autoreset_mode=AutoresetMode.NEXT_STEP."
                )
            for row, value in zip(rows, final_leaves, strict=True):
                row[lane] = value
        return rows

    def _split_answer(self, answer: Any) -> tuple[Any, Mapping[str, Any] | None]:
        """Return the actions and the extras of a policy's answer."""
        is_pair = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping | None)
        if is_pair and (not isinstance(self._schema.action.structure, tuple) or isinstance(answer[0], tuple)):
            return answer[0], answer[1]
        return answer, None

    def _require_same_spaces(self) -> None:
        source = self._source
        if source.lanes != self._lanes:
            raise ArgumentError(
                f"memory has num_envs={self._lanes}, envs has {source.lanes} environments; make the memory with "
                f"num_envs={source.lanes}"
            )
        for name, space, tree in (
            ("observation_space", source.observation_space, self._schema.observation),
            ("action_space", source.action_space, self._schema.action),
        ):
            of_envs = _describe_tree(Tree.of(space, f"envs.{name}"))
            of_memory = _describe_tree(tree)
            if of_envs != of_memory:
                raise ArgumentError(
                    f"{name} of envs is {of_envs}, that of memory is {of_memory}; make the memory with the {name} of "
                    "one environment"
                )


def _make_zeros(tree: Tree, lanes: int) -> list[Array]:
    """Return zeros for every leaf, with a leading axis of `lanes`."""
    return [np.zeros((lanes, *leaf.shape), leaf.dtype) for leaf in tree.leaves]


def _describe_tree(tree: Tree) -> str:
    """Return the names, shapes and dtypes of a space as text. Spaces of equal text fit together: bounds may differ."""
    leaves = sorted(f"{leaf.name}: {leaf.dtype}{leaf.shape}".removeprefix(": ") for leaf in tree.leaves)
    if isinstance(tree.structure, int):
        return leaves[0]
    return f"{'Dict' if isinstance(tree.structure, dict) else 'Tuple'}({', '.join(leaves)})"


def _list_lanes(lanes: Flags) -> list[int]:
    return [int(lane) for lane in np.flatnonzero(lanes)]


def _show_progress(steps: int) -> Iterable[int]:
    """Count steps, with a progress bar on standard error."""
    from rich.console import Console  # noqa: PLC0415  Imported only if progress is shown.
    from rich.progress import track  # noqa: PLC0415

    return track(range(steps), "recording", console=Console(stderr=True))
