"""Samplers that follow episodes: n-step returns, sequences, hindsight goals; and the sequences of a rollout.

In:  single transitions, which another sampler draws.  Out: recipes of what lies around them in their episodes.
Invariant: steps of two episodes are never mixed unless `crossing` asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw, Goals, RewardFunction
from holdall.errors import ArgumentError, TransitionIdError
from holdall.sampling.draw import Held, State, Uniform, own_sampler
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.row_order import LANE, Flags, Ids
from holdall.schema import require_choice, require_count, require_flag, require_number


class ComposedSampler(ABC):
    """A sampler whose transitions are drawn `by` another one; Uniform if it is None. Priorities and state are its."""

    def __init__(self, by: Uniform | Prioritized | None) -> None:
        if not isinstance(by, Uniform | Prioritized | None):
            raise ArgumentError(
                f"by ({type(by).__name__}) must be a sampler of single transitions; pass Uniform() or Prioritized(...)"
            )
        self.by = Uniform() if by is None else by

    @abstractmethod
    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw `count` rows, with replacement."""

    def starts(self, held: Held) -> Held:
        """Return what is held, limited to the transitions that `by` may draw."""
        return held

    def first_ids(self, ids: Ids) -> Ids:
        """Return the transitions that `by` drew, of the ids of a batch."""
        return ids

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Pass priorities to the sampler of the transitions."""
        self._prioritized().update_priorities(held, ids, priorities)

    def require(self, ids: Ids, priorities: NDArray[Any]) -> Ids:
        """Return the transitions that priorities are for; refuse what are none, or not one for every row drawn."""
        return self._prioritized().require(self.first_ids(ids), priorities)

    def _prioritized(self) -> Prioritized:
        if not isinstance(self.by, Prioritized):
            raise ArgumentError(
                f"update_priorities was called, but the memory's {type(self).__name__} draws by Uniform(), which has "
                f"no priorities; construct it as {type(self).__name__}(..., by=Prioritized(...))"
            )
        return self.by

    def state(self) -> State:
        """Return the state of the sampler of the transitions."""
        return self.by.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the sampler of the transitions."""
        self.by.restore(state)

    def resize(self, capacity: int, first_id: int) -> None:
        """See `Sampler`."""
        if isinstance(self.by, Prioritized):
            self.by.resize(capacity, first_id)


class Likelihood:
    """How likely a sampler of holdall's draws each transition: in proportion to what, and to how much in all."""

    def __init__(self, sampler: Any) -> None:
        self._sampler, self._by = sampler, sampler.by if isinstance(sampler, ComposedSampler) else sampler
        self._counted = Prioritized(alpha=0.0)  # counts what may be drawn where all is as likely

    @property
    def prioritized(self) -> Prioritized | None:
        """The priorities that it draws by, if there are any."""
        return self._by if isinstance(self._by, Prioritized) else None

    @property
    def highest(self) -> float:
        """What a new transition is drawn in proportion to; 0 where all are as likely."""
        return self._by.highest if isinstance(self._by, Prioritized) else 0.0

    def raise_highest(self, held: Held, scaled: float) -> None:
        """Draw transitions that come from now on in proportion to no less than this."""
        if isinstance(self._by, Prioritized):
            self._by.raise_highest(self._starts(held), scaled)

    def total(self, held: Held) -> float:
        """Return what all draws are in proportion to: transitions, starts of sequences, or scaled priorities."""
        if held.next_id == held.first_id:
            return 0.0
        starts = self._starts(held)
        if not isinstance(self._by, Prioritized) and starts.allows_all:
            return float(held.next_id - held.first_id)
        return (self.prioritized or self._counted).mass(starts)

    def of(self, held: Held, ids: Ids) -> NDArray[np.float64]:
        """Return what each row of a batch was drawn in proportion to."""
        first = self._sampler.first_ids(ids) if isinstance(self._sampler, ComposedSampler) else ids
        by = self.prioritized
        return np.ones(len(first)) if by is None else by.scaled(self._starts(held), first)

    def _starts(self, held: Held) -> Held:
        return self._sampler.starts(held) if isinstance(self._sampler, ComposedSampler) else held


_AT_ONCE = 1 << 20


class Episodes:
    """The last steps of all episodes held, sorted by lane and tick."""

    def __init__(self) -> None:
        self._ends: NDArray[np.int64] = np.empty(0, np.int64)  # places
        self._next_id = self._first_id = 0
        self._flags_changed = 0

    def __reduce__(self) -> tuple[type[Episodes], tuple[()]]:
        """Pickle nothing: a copy looks at the flags of its own memory."""
        return Episodes, ()

    def bounds(self, held: Held, ids: Ids) -> tuple[Ids, Ids]:
        """Return the places of the first and last held step of the episode of each of `ids`.

        An episode that goes on ends, so far, with the newest step of its lane.
        """
        self._catch_up(held)
        first, last = held.pieces(ids)
        if self._ends.size:
            behind = np.searchsorted(self._ends, held.places(ids))
            before, end = self._ends[behind - 1] + 1, self._ends[np.minimum(behind, len(self._ends) - 1)]
            # An end of another lane lies before or behind all that is held of this one.
            first = np.where(behind > 0, np.maximum(before, first), first)
            last = np.where(behind < len(self._ends), np.minimum(end, last), last)
        return first, last

    def _catch_up(self, held: Held) -> None:
        if held.fields.flags_changed != self._flags_changed:
            self._flags_changed = held.fields.flags_changed
            self._ends, self._next_id = self._ends[:0], 0
        first = max(self._next_id, held.first_id)
        for begin in range(first, held.next_id, _AT_ONCE):
            ids = np.arange(begin, min(begin + _AT_ONCE, held.next_id))
            # A lane that made no transition stands alone: an episode ends before it and one begins after it.
            missing = held.places(ids[~held.fields.are_valid(ids)])
            before = missing[missing % LANE > 0] - 1
            new = np.sort(np.concatenate([held.places(ids[held.fields.are_ends(ids)]), missing, before]))
            self._ends = np.insert(self._ends, np.searchsorted(self._ends, new), new)
        self._next_id = held.next_id
        if 8 * (held.first_id - self._first_id) >= held.capacity:
            self._ends, self._first_id = self._ends[held.at(self._ends)[1]], held.first_id


def steps_around(held: Held, ids: Ids, first: int, stop: int, crossing: bool = False) -> tuple[Ids, Flags]:
    """Return the steps `first` to `stop` - 1 after each of `ids`, (batch, steps), and which are real.

    Args:
        first: 0, for `ids` and what follows them, or negative, for the steps before them.
        crossing: Continue past the ends of episodes.
    """
    steps, real = held.steps(ids, first, stop)
    inside = np.where(real, steps, ids[:, None])
    if not held.fields.all_valid:
        real &= held.fields.are_valid(inside)
    if crossing:
        return inside, real
    if first < 0:
        real &= ~held.fields.are_ends(inside)
        return inside, np.logical_and.accumulate(real[:, ::-1], axis=1)[:, ::-1]
    real[:, 1:] &= ~held.fields.are_ends(inside[:, :-1])
    return inside, np.logical_and.accumulate(real, axis=1)


def padded(steps: Ids, real: Flags) -> Ids:
    """Replace steps that are not real by the last real step before them, or else by the first one after them."""
    position = np.where(real, np.arange(steps.shape[1]), -1)
    nearest = np.maximum.accumulate(position, axis=1)
    nearest = np.where(nearest < 0, real.argmax(axis=1)[:, None], nearest)
    return np.take_along_axis(steps, nearest, axis=1)


@own_sampler("n", "gamma")
class NStep(ComposedSampler):
    """Draw transitions with the discounted rewards of `n` steps.

    In the batch, `obs`, `action` and `extras` are the first step's; `next_obs`, `terminated` and
    `truncated` the last one's; `reward` is the sum of gamma ** k times the k-th reward, added up
    from the first on, in the rewards' dtype but at least float32; `discount` is gamma to the
    number of steps. The target is `reward + discount * ~terminated * value(next_obs)`.

    Args:
        n: Most steps of a return.
        gamma: What a reward is worth a step later.
        by: How the first steps are drawn: `Uniform()` or `Prioritized(...)`.
    """

    def __init__(self, n: int, gamma: float, by: Uniform | Prioritized | None = None) -> None:
        super().__init__(by)
        self.n = require_count("n", n, 1)
        self.gamma = require_number("gamma", gamma, 0.0, 1.0)

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw first steps, and follow each as far as its episode goes."""
        drawn = self.by.draw(held, count, generator)
        steps, real = steps_around(held, drawn.ids, 0, self.n)
        used = np.count_nonzero(real, axis=1)
        powers = [self.gamma**k for k in range(self.n + 1)]
        return Draw(
            drawn.ids,
            drawn.weights,
            last_ids=np.take_along_axis(steps, used[:, None] - 1, axis=1)[:, 0],
            reward=_discounted_sum(held.fields.rewards(steps), real, powers),
            discount=np.array(powers, np.float32)[used],
        )


def _discounted_sum(rewards: NDArray[Any], real: NDArray[np.bool_], powers: list[float]) -> NDArray[Any]:
    """Add up the real ones of (batch, n, ...) rewards, from the first on, each component by itself."""
    dtype = np.result_type(rewards.dtype, np.float32)
    # A reward of another episode must not count, be it infinite; -0.0 changes no sum, not even that of zeros.
    several = (1,) * (rewards.ndim - 2)
    counted = np.where(real.reshape(*real.shape, *several), rewards.astype(dtype), dtype.type(-0.0))
    with np.errstate(invalid="ignore", over="ignore"):  # extreme rewards are the environment's
        terms = counted * np.array(powers[:-1], dtype).reshape(-1, *several)
        total: NDArray[Any] = terms[:, 0].copy()
        for k in range(1, terms.shape[1]):
            total += terms[:, k]
    return total


@own_sampler("length", "burn_in", "stride", "crossing")
class Sequence(ComposedSampler):
    """Draw runs of `length` steps, and the `burn_in` steps before them.

    `mask` is False for padding: behind an episode's last step, which padding repeats, and before its
    first one among the burn-in. The loss is taken over
    `mask[:, burn_in:]`. `weights`, and the priorities given to `update_priorities(batch.ids, ...)`,
    are one a sequence.

    Args:
        length: Steps to learn from.
        burn_in: Steps before them, to warm a recurrent state up with.
        stride: Sequences begin with the first step of an episode, or at every `stride`-th tick.
        crossing: Continue past the ends of episodes; `terminated` and `truncated` show where they are.
        by: How the first steps are drawn: `Uniform()` or `Prioritized(...)`.
    """

    def __init__(
        self,
        length: int,
        burn_in: int = 0,
        stride: int = 1,
        *,
        crossing: bool = False,
        by: Uniform | Prioritized | None = None,
    ) -> None:
        super().__init__(by)
        self.length = require_count("length", length, 1)
        self.burn_in = require_count("burn_in", burn_in, 0)
        self.stride = require_count("stride", stride, 1)
        self.crossing = require_flag("crossing", crossing)
        self._flags_drawn = 0  # how often flags had been set again at the last draw

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw first steps, and collect what lies before and behind them."""
        drawn = self.by.draw(self.starts(held), count, generator)
        self._flags_drawn = held.fields.flags_changed
        before = steps_around(held, drawn.ids, -self.burn_in, 0, self.crossing)
        after = steps_around(held, drawn.ids, 0, self.length, self.crossing)
        steps, real = (np.concatenate(both, axis=1) for both in zip(before, after, strict=True))
        return Draw(padded(steps, real), drawn.weights, mask=real)

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Pass on one priority a sequence; `ids` as in the batch, or those of the first steps alone."""
        first = self.first_ids(ids)
        limits = self.stride > 1 and isinstance(self.by, Prioritized)
        if limits and first.ndim == 1 and first.shape == priorities.shape:
            kept = self._without_lost_starts(held, first)
            first, priorities = first[kept], priorities[kept]
        super().update_priorities(self.starts(held), first, priorities)

    def first_ids(self, ids: Ids) -> Ids:
        """See `ComposedSampler`."""
        return ids[:, self.burn_in] if ids.ndim == 2 and ids.shape[1] == self.burn_in + self.length else ids

    def _without_lost_starts(self, held: Held, first: Ids) -> Flags:
        """Return which steps are starts or not held; refuse those that were none when they were drawn.

        A step loses its place when the end before it is evicted, or flags are set again.
        """
        known = (first >= held.first_id) & (first < held.next_id)
        lost, never = known.copy(), known.copy()
        lost[known] = ~self._are_starts(held, first[known])
        never[lost] = held.steps(first[lost], -1, 0)[1][:, 0]
        never &= lost
        if never.any() and held.fields.flags_changed == self._flags_drawn:
            raise TransitionIdError(
                f"ids holds {first[never][0]}, with which no sequence begins: it is neither the first step of an "
                f"episode nor at a tick that stride ({self.stride}) divides; pass the ids of a batch"
            )
        return ~lost

    def starts(self, held: Held) -> Held:
        """See `ComposedSampler`."""
        return held if self.stride == 1 else held.limited(self._are_starts)

    def _are_starts(self, held: Held, ids: Ids) -> Flags:
        """Return which steps a sequence may begin with."""
        on_stride = held.places(ids) % LANE % self.stride == 0
        steps, is_held = held.steps(ids, -1, 0)
        known = is_held[:, 0]
        before = np.where(known, steps[:, 0], ids)
        first = known & (held.fields.are_ends(before) | ~held.fields.are_valid(before))
        return np.asarray(on_stride | first)


Strategy = Literal["future", "final", "episode"]


@own_sampler(is_saved=False)
class Hindsight(ComposedSampler):
    """Draw transitions, and relabel `k` of them with another goal for every one that stays as it is.

    The first rows of a batch are the relabelled ones: a share of k / (k + 1), rounded down.
    Their rewards are `reward_fn(achieved_goal, desired_goal, extras)`, arrays over the rows, cast
    to the dtype of the stored ones; flags stay as they were.

    Args:
        strategy: The goal is the outcome of a step of the same episode: "future", this one or a
            later one; "final", the last one; "episode", any. Of an episode that is still going on,
            what is known so far counts.
        k: Relabelled rows for every other.
        reward_fn: As Gymnasium's `compute_reward`.
        by: How transitions are drawn: `Uniform()` or `Prioritized(...)`.
        achieved_key: Key of the observation that shows what was achieved.
        desired_key: Key that shows the goal.
    """

    def __init__(
        self,
        strategy: Strategy,
        k: float,
        reward_fn: RewardFunction,
        *,
        by: Uniform | Prioritized | None = None,
        achieved_key: str = "achieved_goal",
        desired_key: str = "desired_goal",
    ) -> None:
        super().__init__(by)
        require_choice("strategy", strategy, get_args(Strategy))
        if not callable(reward_fn):
            raise ArgumentError(f"reward_fn ({reward_fn!r}) must be callable; pass the environment's compute_reward")
        self.strategy = strategy
        self.k = require_number("k", k, 0.0)
        self.reward_fn = reward_fn
        for name, key in (("achieved_key", achieved_key), ("desired_key", desired_key)):
            if not isinstance(key, str):
                raise ArgumentError(f"{name} ({key!r}) must be text; pass a key of the observation space")
        self._keys = (achieved_key, desired_key)
        self._episodes = Episodes()

    def relabelled(self, count: int) -> int:
        """Return how many rows of a batch get another goal."""
        return int(self.k / (self.k + 1) * count)

    def draw(
        self, held: Held, count: int, generator: np.random.Generator, relabelled: int | None = None
    ) -> Draw:  # fmt: skip
        """Draw transitions, and for the first ones, most by default, a step of the same episode."""
        if (several := held.fields.rewards(np.empty(0, np.int64))).ndim > 1:
            raise ArgumentError(
                f"sampler: Hindsight computes one reward a step, and the memory has reward_shape={several.shape[1:]}; "
                "use another sampler, or keep rewards for goals in a memory of their own"
            )
        drawn = self.by.draw(held, count, generator)
        rows = np.arange(self.relabelled(count) if relabelled is None else relabelled)
        return Draw(drawn.ids, drawn.weights, goals=self.goals(self._outcomes(held, drawn.ids[rows], generator)))

    def goals(self, outcomes: Ids) -> Goals:
        """Return the goals of the first rows of a batch: what was achieved with these transitions."""
        return Goals(np.arange(len(outcomes)), outcomes, *self._keys, self.reward_fn)

    def _outcomes(self, held: Held, ids: Ids, generator: np.random.Generator) -> Ids:
        first, last = self._episodes.bounds(held, ids)
        if self.strategy == "final":
            return held.at(last)[0]
        begin = held.places(ids) if self.strategy == "future" else first
        return held.at(begin + generator.integers(0, last - begin + 1))[0]


@dataclass(frozen=True, slots=True)
class RolloutSequences:
    """The sequences of a rollout: where each begins, and how long it is."""

    first_place: NDArray[np.int64]  # tick * lanes + lane
    length: NDArray[np.int64]
    lanes: int

    @classmethod
    def of(cls, ends: Flags, made: Flags, longest: int) -> RolloutSequences:
        """Cut a rollout of (ticks, lanes) at the ends of episodes, at steps not made, and after `longest` steps."""
        ticks, lanes = ends.shape
        begins = np.ones((lanes, ticks), np.bool_)
        begins[:, 1:] = (ends | ~made)[:-1].T
        begins |= ~made.T  # a sequence of its own, which is left out
        index = np.arange(lanes * ticks)
        begun = np.maximum.accumulate(np.where(begins.reshape(-1), index, 0))
        begins |= ((index - begun) % longest == 0).reshape(lanes, ticks)
        starts = np.flatnonzero(begins)
        length = np.diff(starts, append=lanes * ticks)
        lane, tick = np.divmod(starts, ticks)
        real = made.T.reshape(-1)[starts]
        return cls((tick * lanes + lane)[real], length[real], lanes)

    def batches(self, most_steps: int, generator: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield all sequences in random order, up to `most_steps` steps at a time but at least one sequence."""
        order = generator.permutation(len(self.length))
        reach = np.cumsum(self.length[order])
        first, before = 0, 0
        while first < len(order):
            end = max(int(np.searchsorted(reach, before + most_steps, side="right")), first + 1)
            yield self._places(order[first:end])
            first, before = end, int(reach[end - 1])

    def _places(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of some sequences, (sequences, time); -1 behind a sequence's end."""
        length = self.length[chosen]
        step = np.arange(length.max())
        places = self.first_place[chosen][:, None] + step * self.lanes
        return np.where(step < length[:, None], places, -1)
