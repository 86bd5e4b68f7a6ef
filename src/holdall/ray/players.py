"""`collect`: actors that play in environments and feed a memory over shards.

Ray restarts an actor that dies. The restarted actor has a new writer. Transitions that the actor had not sent are lost,
and nothing is added twice. While it plays, an actor waits for shards and for the limiter without a time limit.
`Collection.stop` adds the transitions that are left, even beyond the limiter's bounds, within `timeout_s`. Those that
are not added by then are counted and logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import ray

from holdall.checks import require_count
from holdall.cluster.calls import actor_state, read_last_line
from holdall.cluster.memory import ReplayMemory
from holdall.cluster.messages import GoneError
from holdall.cluster.tuning import ClusterTuning
from holdall.cluster.writer import Writer
from holdall.errors import ShardError
from holdall.schema import Array, Leaf, Tree

_TRY_AGAIN_S = 1.0
"""Seconds before a call that the shards did not accept is repeated."""
_STATE_CHECK_S = 0.5
"""Seconds between checks of the states of actors that are ending."""
_LAST_REPORT_S = 2.0
"""Seconds that an actor that did not end in time has to report what it lost."""
_MAX_RETURNS = 100
"""Number of episodes whose returns an actor remembers."""
_LOG = logging.getLogger("holdall")

MakeAct = Callable[[int], Any]
"""Given an actor's number, returns a function from an observation to an action. If the function has a method `load`, it
is called with the weights that were passed to `Collection.send`."""


@dataclass(slots=True)
class CollectProgress:
    """Progress of an actor since it was started."""

    steps: int = 0
    episodes: int = 0
    returns: list[float] = field(default_factory=list)  # Returns of the last episodes.


class Unsent(NamedTuple):
    """Transitions that an actor played and has not added."""

    rows: int
    reason: str  # The error of the actor. Empty if the actor did not fail.


class Player:
    """One actor. It plays in a thread that its constructor starts."""

    def __init__(
        self, number: int, env_fn: Callable[[], Any], make_act: MakeAct | None, writer: Writer, seed: int
    ) -> None:
        self._number = number
        self._lock = threading.Lock()
        self._progress = CollectProgress()
        self._returns: deque[float] = deque(maxlen=_MAX_RETURNS)
        self._weights: Any = None
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._writer = writer
        self._unaccepted_steps = 0  # Steps that were played and that the writer has not accepted yet.
        arguments = (env_fn, make_act, seed + number)
        self._thread = threading.Thread(target=self._run, args=arguments, name="holdall-player", daemon=True)
        self._thread.start()

    def load(self, weights: Any) -> None:
        """Choose the next actions with these weights."""
        with self._lock:
            self._weights = weights

    def progress(self) -> CollectProgress:
        """Return the progress. Raise ShardError if the actor failed."""
        with self._lock:
            if self._failure is not None:
                raise ShardError(
                    f"Actor {self._number} failed ({type(self._failure).__name__}: {self._failure}). Fix the "
                    "cause, and call collect again."
                )
            return CollectProgress(self._progress.steps, self._progress.episodes, list(self._returns))

    def stop(self) -> Unsent:
        """End after the current step, and send all transitions. Ignore the limiter, because the learner has ended."""
        self._stopped.set()
        self._writer.ignore_limit()
        self._thread.join()
        return self.unsent()

    def unsent(self) -> Unsent:
        """Return the transitions that would be lost if the actor ended now."""
        with self._lock:
            failure = self._failure
            unaccepted_steps = self._unaccepted_steps
        rows = unaccepted_steps + self._writer.waiting_rows + self._writer.unacknowledged_rows
        return Unsent(rows, "" if failure is None else f"{type(failure).__name__}: {failure}")

    def _run(self, env_fn: Callable[[], Any], make_act: MakeAct | None, seed: int) -> None:
        """Play until the actor is stopped or fails. Send all transitions in both cases."""
        env = None
        try:
            env = env_fn()
            env.action_space.seed(seed)
            act = (lambda _: env.action_space.sample()) if make_act is None else make_act(self._number)
            self._play(env, act, seed)
        except Exception as error:
            self._fail(error)
        try:
            while not self._try_call(self._writer.close):
                pass
        except Exception as error:
            self._fail(error)
        if env is not None:
            with suppress(Exception):  # An error of the environment no longer matters.
                env.close()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = self._failure or error
        _LOG.warning("Actor %d stopped playing: %s: %s", self._number, type(error).__name__, error)

    def _play(self, env: Any, act: Any, seed: int) -> None:
        schema = self._writer.schema
        obs, _ = env.reset(seed=seed)
        episode_return = 0.0
        while not self._stopped.is_set():
            with self._lock:
                weights = self._weights
                self._weights = None
            if weights is not None and hasattr(act, "load"):
                act.load(weights)
            action = act(obs)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            step = (
                _add_lane_axis(schema.observation, obs, "obs"),
                _add_lane_axis(schema.action, action, "action"),
                np.array([reward], np.float32),
                _add_lane_axis(schema.observation, next_obs, "next_obs"),
                np.array([terminated]),
                np.array([truncated]),
            )
            self._unaccepted_steps = 1
            while not self._try_call(self._writer.add, *step):
                pass
            episode_return += float(reward)
            ended = terminated or truncated
            with self._lock:
                self._unaccepted_steps = 0
                self._progress.steps += 1
                self._progress.episodes += ended
                if ended:
                    self._returns.append(episode_return)
            if ended:
                obs, _ = env.reset()
                episode_return = 0.0
            else:
                obs = next_obs

    def _try_call(self, method: Callable[..., None], *arguments: Any) -> bool:
        """Call a method of the writer. Return False, after a pause, if the shards do not accept anything now."""
        try:
            method(*arguments)
        except GoneError:
            raise
        except ShardError as error:
            _LOG.warning("Actor %d waits for the shards: %s", self._number, error)
            time.sleep(_TRY_AGAIN_S)
            return False
        return True


class Collection:
    """Actors that play until they are stopped. Also a context manager."""

    def __init__(self, actors: list[Any], tuning: ClusterTuning) -> None:
        self._actors = actors
        self._tuning = tuning
        self._known = [CollectProgress() for _ in actors]
        self._sent: dict[int, Any] = {}  # The last call of `load` to each actor.

    def send(self, weights: Any) -> None:
        """Send new weights to all actors.

        An actor that has not received earlier weights yet, because it is being started, gets only the newest ones.
        """
        shared = ray.put(weights)
        for number, actor in enumerate(self._actors):
            if number in self._sent:
                ray.cancel(self._sent[number])  # Has no effect on a call that was executed.
            self._sent[number] = actor.load.remote(shared)

    def progress(self) -> list[CollectProgress]:
        """Return the progress of every actor. Raise ShardError if one failed.

        For an actor that does not answer within `progress_s` seconds of the tuning, return the last known progress.
        """
        calls = [actor.progress.remote() for actor in self._actors]
        end_s = time.monotonic() + self._tuning.progress_s
        for number, call in enumerate(calls):
            try:
                self._known[number] = ray.get(call, timeout=max(0.0, end_s - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                raise ShardError(str(getattr(error, "cause", error))) from error
            except ray.exceptions.RayActorError as error:
                if actor_state(self._actors[number]) == "gone":
                    reason = read_last_line(error)
                    raise ShardError(f"Actor {number} could not be started ({reason}). Fix the cause.") from error
                self._known[number] = CollectProgress()  # The actor is being restarted.
            except ray.exceptions.GetTimeoutError:
                continue
        return self._known[: len(calls)]

    def stop(self, timeout_s: float = 30.0) -> int:
        """End all actors once they have added the transitions that they played.

        Return how many transitions could not be added, as far as the actors reported that.

        Actors stop waiting for a `limit`, so each actor may add a segment and a step beyond its bounds. If shards do
        not answer, the actors wait for them at most `timeout_s` seconds. Transitions that are not added by then are
        lost, and a warning for each actor says how many and why.
        """
        actors = self._actors
        self._actors = []
        if actors and not ray.is_initialized():  # The calls below would start Ray again.
            _LOG.warning(
                "Ray was shut down before %d actors had ended. Transitions that they had not sent are lost.",
                len(actors),
            )
            return 0
        try:
            calls = [actor.stop.remote() for actor in actors]
            _wait_for_ends(calls, actors, timeout_s)
            ended = ray.wait(calls, num_returns=len(calls), timeout=0)[0] if calls else []
            reports = {}
            for number, (call, actor) in enumerate(zip(calls, actors, strict=True)):
                if call in ended:
                    reports[number] = call
                elif actor_state(actor) != "starting":  # An actor that never started has played nothing.
                    reports[number] = actor.unsent.remote()
            end_s = time.monotonic() + _LAST_REPORT_S
            return sum(_count_lost_rows(number, call, end_s) for number, call in reports.items())
        finally:
            for actor in actors:
                ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def collect(
    env_fn: Callable[[], Any],
    num_actors: int,
    memory: ReplayMemory,
    make_act: MakeAct | None = None,
    *,
    seed: int = 0,
    num_cpus: float = 1.0,
    spread: int | None = None,
    _tuning: ClusterTuning | None = None,
) -> Collection:
    """Start actors that play and feed a memory.

    Observations are added in the dtype of their space, as Gymnasium's vector environments return them, and rewards as
    float32. To add other values, step your environments in your own actors with `memory.writer()`.

    Args:
        env_fn: Makes a Gymnasium environment in the process of an actor, with the spaces of the memory.
        make_act: Given the number of an actor, returns the function that chooses actions. None: random actions.
        num_cpus: CPUs that Ray reserves for each actor.
        spread: Number of shards that each actor sends to. None: 2 if there are more than two shards and at least as
            many actors as shards, otherwise all.
    """
    require_count("num_actors", num_actors, 1)
    if spread is None and num_actors >= memory.num_shards > 2:
        spread = 2
    remote: Any = ray.remote
    player = remote(num_cpus=num_cpus, max_restarts=-1, max_concurrency=4)(Player)
    actors = [
        player.remote(number, env_fn, make_act, memory.writer(num_envs=1, spread=spread), seed)
        for number in range(num_actors)
    ]
    return Collection(actors, _tuning or ClusterTuning())


def _wait_for_ends(calls: list[Any], actors: list[Any], timeout_s: float) -> None:
    """Wait until the calls of `Player.stop` to running actors have ended. Other actors have nothing to send."""
    pending = dict(zip(calls, actors, strict=True))
    end_s = time.monotonic() + timeout_s
    while pending and time.monotonic() < end_s:
        wait_s = min(_STATE_CHECK_S, max(0.0, end_s - time.monotonic()))
        for call in ray.wait(list(pending), num_returns=len(pending), timeout=wait_s)[0]:
            del pending[call]
        if all(actor_state(actor) != "up" for actor in pending.values()):
            return


def _count_lost_rows(number: int, call: Any, end_s: float) -> int:
    """Return how many transitions an actor could not add, and log them. Return 0 if the actor does not report that."""
    try:
        rows, reason = ray.get(call, timeout=max(0.0, end_s - time.monotonic()))
    except ray.exceptions.RayError as error:
        kind = type(error).__name__
        _LOG.warning("Actor %d did not answer (%s). If it had transitions to send, they are lost.", number, kind)
        return 0
    if rows:
        reason = reason or "the shards had not accepted them in time"
        _LOG.warning("Actor %d ended with %d transitions that could not be added: %s", number, rows, reason)
    return int(rows)


def _add_lane_axis(tree: Tree, value: Any, argument: str) -> Any:
    """Return a value of a single environment with a leading lane axis."""
    return tree.build(tree.flatten(value, (1,), argument, _cast))


def _cast(leaf: Leaf, value: Any, leading: tuple[int, ...], _argument: str) -> Array:
    """Return a value in the dtype of its space, as Gymnasium's vector environments do."""
    array: Array = np.asarray(value)
    return array.astype(leaf.dtype, copy=False).reshape(*leading, *leaf.shape)
