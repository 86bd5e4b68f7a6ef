"""Recorder: steps environments and adds what really happened, however they reset.

    step -> actions checked -> what must be reset is reset -> envs.step -> true final observations -> memory.add

In:  a Gymnasium vector environment, one environment, or a VecEnv of Stable-Baselines3; actions.
Out: what the environment returned; one transition in the memory for each that was made.
Invariant: a reset is never a transition, and `next_obs` is never the first observation of another episode. A call that
is refused steps nothing and adds nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.gymnasium import DISABLED, NEXT_STEP, SAME_STEP, FinalInfo, Made, mode_named, source_of
from holdall.replay import ReplayMemory
from holdall.rollout import RolloutMemory
from holdall.schema import Array, Tree, fit_flags, require_count, whole

Flags = NDArray[np.bool_]
Policy = Callable[[Any], Any]


class Recorder:
    """Steps environments, and adds what happened to a memory.

    Args:
        envs: A Gymnasium vector environment, an environment of `gymnasium.make`, or a VecEnv of Stable-Baselines3.
        memory: A `ReplayMemory` or `RolloutMemory` of the same spaces and as many lanes.
        autoreset_mode: "next_step", "same_step" or "disabled", or a Gymnasium `AutoresetMode`. None: what
            `envs.metadata["autoreset_mode"]` says. If it says nothing, the first end of an episode shows it: with
            `info["final_obs"]` it is "same_step", else "next_step" is assumed, with a warning.

    Lanes that nobody has reset are reset before they are stepped: all of them at first, and with "disabled" those whose
    episodes ended. A policy acts on `recorder.obs`, which is always the observation that the next step begins with.
    """

    def __init__(self, envs: Any, memory: Any, *, autoreset_mode: Any = None) -> None:
        if not all(hasattr(memory, name) for name in ("add", "schema")):
            raise ArgumentError(
                f"memory ({type(memory).__name__}) cannot be recorded to; pass a ReplayMemory or a RolloutMemory"
            )
        self.envs, self.memory = envs, memory
        self._schema, self._lanes = memory.schema, memory.schema.num_envs
        self._source = source_of(envs)
        mode = self._source.mode if autoreset_mode is None else mode_named(autoreset_mode, "autoreset_mode")
        if self._source.says_mode and mode != self._source.mode:
            raise ArgumentError(
                f"autoreset_mode is {mode!r}, but {type(envs).__name__} says {self._source.mode!r}; leave it out, or "
                "correct envs.metadata['autoreset_mode'] if that is wrong"
            )
        self._mode, self._is_assumed = mode or NEXT_STEP, mode is None
        self._has_seen_end = False
        self._require_same_spaces()
        self._rollout = memory if isinstance(memory, RolloutMemory) else None
        self._kept: list[Array] | None = None  # copies of the observations that the next step begins with, by leaf
        self._shown: Any = None  # the same as the environment gave them
        self._ended: Flags = np.zeros(self._lanes, np.bool_)  # lanes whose episode ended, and that were not reset since
        self._has_ended = False  # whether there are any
        self._running: Flags = np.zeros(self._lanes, np.bool_)  # lanes whose last transition did not end its episode
        self._last_reward: Array | None = None
        self._is_watched = isinstance(memory, ReplayMemory)  # whether to look if somebody else adds
        self._left_at: int | None = None  # the memory's next id after this recorder's last step
        self._is_torn = False  # whether a step did not get to its end: only a reset says where the lanes are

    @property
    def obs(self) -> Any:
        """The observations that the next step begins with; lanes that must be reset by the caller are reset first."""
        self._reset_where_needed()
        return self._shown

    def step(self, actions: Any, extras: Mapping[str, Any] | None = None, **named: Any) -> Any:
        """Step the environments, add the transitions, and return what `envs.step` returned.

        Args:
            extras: Further fields of the step, by name; they may as well be given as keyword arguments. A
                `RolloutMemory` takes its `value` and `log_prob` from them.
        """
        if extras is not None and not isinstance(extras, Mapping):
            raise ArgumentError(f"extras ({extras!r}) must be a dict of fields by name; pass one, or name=value")
        action, others = self._fit_before(actions, named if extras is None else {**extras, **named})
        if self._rollout is not None and (stale := self._lanes_to_reset()) is not None:
            raise ArgumentError(
                f"lanes {_numbers(stale)} were not reset since their episode ended, so value and log_prob are not of "
                "the observations that this step begins with; compute them of recorder.obs, which resets, or call "
                "recorder.reset(options={'reset_mask': ...}) before"
            )
        self._reset_where_needed()
        if self._is_watched:
            self._look_for_others()
        self._is_torn = True
        returned, made = self._source.step(self._source.taken(self._schema.action, actions, action, self._shown))
        after = self._observed(made.obs)
        terminated = fit_flags(made.terminated, (self._lanes,), "terminated")
        truncated = fit_flags(made.truncated, (self._lanes,), "truncated")
        ends = terminated | truncated
        has_ends = bool(np.count_nonzero(ends))
        valid = ~self._ended if self._has_ended and self._mode == NEXT_STEP else None
        if valid is not None:
            self._require_only_resets(made, ends, ~valid)
        if self._is_assumed and has_ends:
            self._examine(made)
        next_obs = self._with_final(after, made.info, ends) if has_ends and self._mode == SAME_STEP else after
        reward = made.reward if made.reward.ndim > len(self._schema.reward_shape) else made.reward[None]
        self._write(action, others, reward, terminated, truncated, next_obs, valid)
        self._kept, self._shown = [np.array(leaf, order="C") for leaf in after], made.obs
        self._running = ~ends if valid is None else ~ends & valid
        self._has_ended = has_ends and self._mode != SAME_STEP
        self._ended = ends if self._has_ended or not has_ends else np.zeros_like(ends)
        self._is_torn = False
        return returned

    def reset(self, *, seed: Any = None, options: Mapping[str, Any] | None = None) -> Any:
        """Reset all lanes, or those of `options["reset_mask"]`, and return what `envs.reset` returned.

        An episode that has not ended is cut: its transitions stay as they are, and no n-step return or sequence goes on
        into the next one.
        """
        mask = np.ones(self._lanes, np.bool_)
        if options is not None and "reset_mask" in options:
            mask = fit_flags(options["reset_mask"], (self._lanes,), "options['reset_mask']")
            if (self._kept is None or self._is_torn) and not mask.all():
                raise ArgumentError(
                    f"options['reset_mask'] leaves out lanes {_numbers(~mask)}, of which no observation is known; "
                    "reset all lanes first"
                )
        cut = self._cut_by(mask)
        if self._rollout is not None and cut.any() and len(self._rollout):
            raise ArgumentError(
                f"a reset would cut the episodes of lanes {_numbers(cut)} within a rollout, and their advantages "
                "would reach into other episodes; call memory.reset() before, which begins a new rollout"
            )
        returned, shown = self._source.reset(seed, None if options is None else dict(options))
        new = [np.array(leaf, order="C") for leaf in self._observed(shown)]
        if self._kept is not None and not mask.all():
            for leaf, kept in zip(new, self._kept, strict=True):
                leaf[~mask] = kept[~mask]
            shown = self._schema.observation.build([leaf.copy() for leaf in new])
        if self._rollout is None and cut.any():
            self._add_border(new)
        self._kept, self._shown = new, shown
        self._ended = self._ended & ~mask
        self._has_ended = bool(self._ended.any())
        self._running = self._running & ~mask
        self._is_torn = False
        return returned

    def collect(self, policy: Policy, steps: float | None = None, *, progress: bool = True) -> int:
        """Step `steps` times with what the policy answers, and return how many transitions were made.

        Args:
            policy: Gets `recorder.obs`; returns actions, or actions and a dict of extras, or actions and None.
            steps: Steps of all lanes; None fills a RolloutMemory. 1e6 is a million.
            progress: Show a progress bar, if standard error is a terminal.
        """
        if not callable(policy):
            raise ArgumentError(
                f"policy ({policy!r}) must be a function of observations; pass one that returns actions"
            )
        if self._rollout is not None:
            left = round(self._rollout.num_steps * (1 - self._rollout.fill))
            steps = left if steps is None else steps
            if require_count("steps", whole(steps), 0) > left:
                raise ArgumentError(
                    f"steps ({steps}) is more than the {left} that the rollout has room for; pass {left} or fewer, or "
                    "call memory.reset() before"
                )
        count, made = require_count("steps", whole(steps), 0), 0
        for _ in _with_progress(count) if progress and sys.stderr.isatty() else range(count):
            actions, extras = self._answer_of(policy(self.obs))
            made += self._lanes - (int(np.count_nonzero(self._ended)) if self._mode == NEXT_STEP else 0)
            self.step(actions, extras)
        return made

    def _fit_before(self, actions: Any, fields: dict[str, Any]) -> tuple[list[Array], dict[str, Any]]:
        """Check all that a step is given, and return copies: environments may write to what they get."""
        schema, flatten = self._schema, self._source.flatten
        others: dict[str, Any] = {}
        if self._rollout is not None:
            missing = [name for name in ("value", "log_prob") if fields.get(name) is None]
            if missing:
                raise ArgumentError(
                    f"{missing[0]} is missing: a RolloutMemory needs the policy's value and log_prob of every step; "
                    "pass recorder.step(actions, value=..., log_prob=...)"
                )
            others = {name: self._source.batched_floats(fields.pop(name)) for name in ("value", "log_prob")}
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

    def _observed(self, obs: Any) -> list[Array]:
        """Check what an environment gave, by leaf."""
        try:
            return self._source.flatten(self._schema.observation, obs, "obs")
        except ArgumentError as error:
            raise ArgumentError(
                f"envs gave an observation that its space does not describe: {error}. If it gives such observations "
                "by right, set envs.observation_space to what they are, and make the memory with that"
            ) from error

    def _write(
        self, action: list[Array], others: dict[str, Any], reward: Array, terminated: Flags, truncated: Flags,
        next_obs: list[Array], valid: Flags | None,
    ) -> None:  # fmt: skip
        tree, kept = self._schema.observation, self._kept
        assert kept is not None  # reset before the step
        obs, acted, following = tree.build(kept), self._schema.action.build(action), tree.build(next_obs)
        if valid is not None:
            others["valid"] = valid
        if self._rollout is not None:
            self._rollout.add(obs, acted, reward, terminated, truncated, final_obs=following, **others)
            return
        self.memory.add(obs, acted, reward, following, terminated, truncated, **others)
        self._last_reward = reward

    def _add_border(self, new: list[Array]) -> None:
        """Add a tick in which no lane made a transition, so that no episode before it goes on behind it."""
        schema, lanes = self._schema, self._lanes
        like = self._last_reward
        if like is None:
            like, _, _ = self.memory.outcomes([self.memory.next_id - lanes])
        reward = np.zeros((lanes, *schema.reward_shape), like.dtype)
        action, extras = ([np.zeros((lanes, *leaf.shape), leaf.dtype) for leaf in tree.leaves]
                          for tree in (schema.action, schema.extras))  # fmt: skip
        obs = schema.observation.build(new if self._kept is None else self._kept)
        none = np.zeros(lanes, np.bool_)
        self.memory.add(
            obs, schema.action.build(action), reward, schema.observation.build(new), none, none,
            schema.extras.build(extras), none,
        )  # fmt: skip
        self._left_at = None  # nobody else has added it

    def _look_for_others(self) -> None:
        """Warn, once, if somebody else has added to the memory in the middle of an episode."""
        next_id = self.memory.next_id
        is_alone = self._left_at is None or self._left_at == next_id
        self._left_at = next_id + self._lanes
        if not is_alone and self._running.any():
            self._is_watched = False
            warnings.warn(
                f"somebody else added to memory in the middle of the episodes of lanes {_numbers(self._running)}: "
                "n-step returns and sequences go on from one stream of steps into another. Record all environments "
                "with one Recorder, as a vector environment, or add elsewhere only after recorder.reset()",
                stacklevel=3,
            )

    def _cut_by(self, mask: Flags) -> Flags:
        """Return the lanes of `mask` whose newest transition does not end its episode."""
        if not isinstance(self.memory, ReplayMemory):
            return mask & (self._running | self._is_torn)
        cut = np.zeros(self._lanes, np.bool_)
        if next_id := self.memory.next_id:
            lanes = np.flatnonzero(mask)
            lanes = lanes[self.memory.are_valid(next_id - self._lanes + lanes)]
            _, terminated, truncated = self.memory.outcomes(next_id - self._lanes + lanes)
            cut[lanes] = ~(terminated | truncated)
        return cut

    def _lanes_to_reset(self) -> Flags | None:
        """Return the lanes that must be reset before they are stepped; None if there are none."""
        if self._kept is None or self._is_torn:
            return np.ones(self._lanes, np.bool_)
        return self._ended.copy() if self._has_ended and self._mode == DISABLED else None

    def _reset_where_needed(self) -> None:
        if (lanes := self._lanes_to_reset()) is not None:
            self.reset(options=None if lanes.all() else {"reset_mask": lanes})

    def _require_only_resets(self, made: Made, ends: Flags, resets: Flags) -> None:
        """Refuse what next-step autoreset cannot have: an end in a step that only resets.

        A reward shows the same, but may be a wrapper's, so it counts only where next-step autoreset is a guess.
        """
        if ends[resets].any() or (self._is_assumed and np.any(made.reward[resets])):
            raise ArgumentError(
                f"lanes {_numbers(resets)} have a reward or an end in the step after an episode's end, which next-step "
                "autoreset has not; pass autoreset_mode='same_step' or 'disabled' to Recorder, or correct "
                "envs.metadata['autoreset_mode'], and begin a new memory"
            )

    def _examine(self, made: Made) -> None:
        """Find out at an episode's end how an environment resets that does not say it."""
        if self._has_seen_end:
            return
        self._has_seen_end = True
        if FinalInfo.of(made.info) is not None:
            self._mode, self._is_assumed = SAME_STEP, False
            return
        warnings.warn(
            "envs.metadata has no 'autoreset_mode', and info has no 'final_obs': the step after an episode's end is "
            "taken for a reset, as Gymnasium does by default. Pass autoreset_mode='next_step' to Recorder if that is "
            "right, else 'disabled' or 'same_step'",
            stacklevel=3,
        )

    def _with_final(self, after: list[Array], info: Any, ends: Flags) -> list[Array]:
        """Return observations with the true final ones where episodes ended."""
        final = FinalInfo.of(info)
        rows = [np.array(leaf, order="C") for leaf in after]
        for lane in np.flatnonzero(ends):
            found = None if final is None else final.leaves_of(self._schema.observation, int(lane))
            if found is None:
                raise ArgumentError(
                    f"info has no 'final_obs' for lane {lane}, whose episode ended in same-step autoreset: its true "
                    "final observation is lost; make the environment put it there, or make it with "
                    "autoreset_mode=AutoresetMode.NEXT_STEP"
                )
            for row, value in zip(rows, found, strict=True):
                row[lane] = value
        return rows

    def _answer_of(self, answer: Any) -> tuple[Any, Mapping[str, Any] | None]:
        """Take a policy's answer apart: actions, or actions and extras."""
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
            theirs, ours = _described(Tree.of(space, f"envs.{name}")), _described(tree)
            if theirs != ours:
                raise ArgumentError(
                    f"{name} of envs is {theirs}, that of memory is {ours}; make the memory with the {name} of one "
                    "environment"
                )


def _described(tree: Tree) -> str:
    """Describe what must be the same in two spaces: names, shapes and dtypes, but no bounds."""
    leaves = sorted(f"{leaf.name}: {leaf.dtype}{leaf.shape}".removeprefix(": ") for leaf in tree.leaves)
    if isinstance(tree.structure, int):
        return leaves[0]
    return f"{'Dict' if isinstance(tree.structure, dict) else 'Tuple'}({', '.join(leaves)})"


def _numbers(lanes: Flags) -> list[int]:
    return [int(lane) for lane in np.flatnonzero(lanes)]


def _with_progress(steps: int) -> Iterable[int]:
    """Count steps, with a bar on standard error."""
    from rich.console import Console  # noqa: PLC0415 imported only where it is seen
    from rich.progress import track  # noqa: PLC0415

    return track(range(steps), "recording", console=Console(stderr=True))
