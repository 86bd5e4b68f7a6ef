"""Collecting: actors that play, and feed a memory over shards.

In:  a way to make an environment and one to choose actions.  Out: transitions in the memory; progress.
Invariant: an actor that dies is started again by Ray and plays on with a new writer; what it had not sent is lost with
it, and nothing is added twice. Actors wait when the shards or the limiter do, however long, and play on when they are
back. At the end all that was played is added, also on top of the limiter's bounds; what cannot be is counted and named.
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

from holdall.cluster.memory import ReplayMemory
from holdall.cluster.protocol import GoneError, actor_state
from holdall.cluster.writer import Writer
from holdall.errors import ShardError
from holdall.schema import Array, Leaf, Tree, require_count

_TRY_AGAIN_S = 1.0
_PROGRESS_S = 10.0
_LOOK_S, _LAST_WORD_S = 0.5, 2.0
"""How often actors that end are looked at, and how long one that did not end in time may take to say what it has."""
_LOG = logging.getLogger("holdall")
_RETURNS = 100
"""Episodes whose returns an actor remembers."""

MakeAct = Callable[[int], Any]
"""Given an actor's number, returns a function from an observation to an action; its `load(weights)`, if it has one, is
called with what `Collection.send` was given."""


@dataclass(slots=True)
class CollectProgress:
    """What an actor has done since it was started."""

    steps: int = 0
    episodes: int = 0
    returns: list[float] = field(default_factory=list)  # of the last episodes


class Unsent(NamedTuple):
    """Transitions that an actor played and has not added."""

    rows: int
    why: str  # what went wrong with the actor; nothing: it was not done yet


class Player:
    """One actor: plays in a thread of its own, from the start on."""

    def __init__(
        self, number: int, env_fn: Callable[[], Any], make_act: MakeAct | None, writer: Writer, seed: int
    ) -> None:
        self._number = number
        self._lock = threading.Lock()
        self._progress = CollectProgress()
        self._returns: deque[float] = deque(maxlen=_RETURNS)
        self._weights: Any = None
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._writer, self._in_hand = writer, 0  # steps that were played, and that the writer has not taken yet
        work = (env_fn, make_act, seed + number)
        self._thread = threading.Thread(target=self._run, args=work, name="holdall-player", daemon=True)
        self._thread.start()

    def load(self, weights: Any) -> None:
        """Have the next actions chosen with these."""
        with self._lock:
            self._weights = weights

    def progress(self) -> CollectProgress:
        """Say how far it is; raise what went wrong."""
        with self._lock:
            if self._failure is not None:
                raise ShardError(
                    f"actor {self._number} failed ({type(self._failure).__name__}: {self._failure}); correct that, and "
                    "collect again"
                )
            return CollectProgress(self._progress.steps, self._progress.episodes, list(self._returns))

    def stop(self) -> Unsent:
        """End after the step that it is at, and send what waits; the learner, for whom a limiter waits, has ended."""
        self._stopped.set()
        self._writer.ignore_limit()
        self._thread.join()
        return self.unsent()

    def unsent(self) -> Unsent:
        """Say what would be lost if the actor ended now."""
        with self._lock:
            failure, in_hand = self._failure, self._in_hand
        rows = in_hand + self._writer.waiting_rows + self._writer.unacknowledged_rows
        return Unsent(rows, "" if failure is None else f"{type(failure).__name__}: {failure}")

    def _run(self, env_fn: Callable[[], Any], make_act: MakeAct | None, seed: int) -> None:
        """Play until it is stopped or something fails; what was played by then is sent in either case."""
        env = None
        try:
            env = env_fn()
            env.action_space.seed(seed)
            act = (lambda _: env.action_space.sample()) if make_act is None else make_act(self._number)
            self._play(env, act, seed)
        except Exception as error:
            self._fail(error)
        try:
            while not self._is_done(self._writer.close):
                pass
        except Exception as error:
            self._fail(error)
        if env is not None:
            with suppress(Exception):  # all that it gave is sent
                env.close()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = self._failure or error
        _LOG.warning("actor %d plays no more: %s: %s", self._number, type(error).__name__, error)

    def _play(self, env: Any, act: Any, seed: int) -> None:
        schema = self._writer.schema
        obs, _ = env.reset(seed=seed)
        played = 0.0
        while not self._stopped.is_set():
            with self._lock:
                weights, self._weights = self._weights, None
            if weights is not None and hasattr(act, "load"):
                act.load(weights)
            action = act(obs)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            step = (
                _batched(schema.observation, obs),
                _batched(schema.action, action),
                np.array([reward], np.float32),
                _batched(schema.observation, next_obs),
                np.array([terminated]),
                np.array([truncated]),
            )
            self._in_hand = 1
            while not self._is_done(self._writer.add, *step):
                pass
            played += float(reward)
            ended = terminated or truncated
            with self._lock:
                self._in_hand = 0
                self._progress.steps += 1
                self._progress.episodes += ended
                if ended:
                    self._returns.append(played)
            obs, played = (env.reset()[0], 0.0) if ended else (next_obs, played)

    def _is_done(self, act: Callable[..., None], *arguments: Any) -> bool:
        """Add a step, or send what waits, unless the shards do not take it now; then it is tried again later."""
        try:
            act(*arguments)
        except GoneError:  # for good
            raise
        except ShardError as error:
            _LOG.warning("actor %d waits for the shards: %s", self._number, error)
            time.sleep(_TRY_AGAIN_S)
            return False
        return True


class Collection:
    """Actors that play until they are stopped; also a context manager."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors
        self._known = [CollectProgress() for _ in actors]
        self._sent: dict[int, Any] = {}  # the last call of `load` to each

    def send(self, weights: Any) -> None:
        """Have all actors choose with these weights from now on; they are sent once for all.

        An actor that has not taken those before, as it is away, or waits for room, is sent the newest only.
        """
        shared = ray.put(weights)
        for number, actor in enumerate(self._actors):
            if number in self._sent:
                ray.cancel(self._sent[number])  # which does nothing to one that was taken
            self._sent[number] = actor.load.remote(shared)

    def progress(self) -> list[CollectProgress]:
        """Say how far every actor is; raise what went wrong with one.

        One that does not answer within seconds is as far as it last said: its machine may be away, or too full for it.
        """
        calls = [actor.progress.remote() for actor in self._actors]
        until = time.monotonic() + _PROGRESS_S
        for number, call in enumerate(calls):
            try:
                self._known[number] = ray.get(call, timeout=max(0.0, until - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                raise ShardError(str(getattr(error, "cause", error))) from error
            except ray.exceptions.RayActorError as error:
                if actor_state(self._actors[number]) == "gone":  # for good, as it cannot be made where it runs
                    reason = str(error).strip().splitlines()[-1]
                    raise ShardError(f"actor {number} could not be started ({reason}); correct that") from error
                self._known[number] = CollectProgress()  # it is being started again
            except ray.exceptions.GetTimeoutError:
                continue
        return self._known[: len(calls)]

    def stop(self, timeout_s: float = 30.0) -> int:
        """End all actors once they have added what they played; return how many transitions could not be added.

        With a `limit`, they do not wait for draws any more: what is left comes on top of its bounds, at most a segment
        and a step of each actor. While shards do not answer they are waited for, `timeout_s` seconds at most. What is
        not added then is lost; a warning says so for each actor, and why.
        """
        actors, self._actors = self._actors, []
        if actors and not ray.is_initialized():  # the calls below would start it again
            _LOG.warning("Ray was shut down before %d actors were stopped: what they had not sent is lost", len(actors))
            return 0
        try:
            calls = [actor.stop.remote() for actor in actors]
            _wait_for(calls, actors, timeout_s)
            ended = ray.wait(calls, num_returns=len(calls), timeout=0)[0] if calls else []
            asked = {
                number: call if call in ended else actor.unsent.remote()
                for number, (call, actor) in enumerate(zip(calls, actors, strict=True))
                if call in ended or actor_state(actor) != "starting"  # which has played nothing
            }
            until = time.monotonic() + _LAST_WORD_S
            return sum(_rows_lost(number, call, until) for number, call in asked.items())
        finally:
            for actor in actors:
                ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def collect(
    env_fn: Callable[[], Any], num_actors: int, memory: ReplayMemory, make_act: MakeAct | None = None,
    *,
    seed: int = 0, num_cpus: float = 1.0, spread: int | None = None,
) -> Collection:  # fmt: skip
    """Start actors that play and feed a memory.

    Args:
        env_fn: Makes a Gymnasium environment, in an actor's process; its spaces are the memory's.
        make_act: Makes, given the actor's number, what chooses actions; None: at random.
        num_cpus: What Ray reserves for each actor.
        spread: Shards that each sends to, see `ReplayMemory.writer`; None: all, or 2 where there are many actors.
    """
    require_count("num_actors", num_actors, 1)
    few = 2 if num_actors >= memory.num_shards > 2 else None
    remote: Any = ray.remote
    player = remote(num_cpus=num_cpus, max_restarts=-1, max_concurrency=4)(Player)
    return Collection(
        [
            player.remote(number, env_fn, make_act, memory.writer(num_envs=1, spread=spread or few), seed)
            for number in range(num_actors)
        ]
    )


def _wait_for(calls: list[Any], actors: list[Any], timeout_s: float) -> None:
    """Wait until actors have ended, but not for those that never started, or lost all when their process ended."""
    left, until = dict(zip(calls, actors, strict=True)), time.monotonic() + timeout_s
    while left and (rest_s := until - time.monotonic()) > 0:
        for call in ray.wait(list(left), num_returns=len(left), timeout=min(_LOOK_S, rest_s))[0]:
            del left[call]
        if all(actor_state(actor) != "up" for actor in left.values()):
            return


def _rows_lost(number: int, call: Any, until: float) -> int:
    """Say what an actor played and did not add; return how many transitions that is, as far as it says so."""
    try:
        rows, why = ray.get(call, timeout=max(0.0, until - time.monotonic()))
    except ray.exceptions.RayError as error:
        said = type(error).__name__
        _LOG.warning("actor %d did not answer (%s): what it had not sent is lost, if it had anything", number, said)
        return 0
    if rows:
        why = why or "the shards had not taken them in time"
        _LOG.warning("actor %d was ended with %d transitions that it played and could not add: %s", number, rows, why)
    return int(rows)


def _batched(tree: Tree, value: Any) -> Any:
    """Give a single step a lane of its own, in the dtypes and shapes of the memory's space."""

    def lane(leaf: Leaf, part: Any) -> Array:
        array: Array = np.asarray(part)
        return (array if array.dtype == leaf.dtype else array.astype(leaf.dtype)).reshape(1, *leaf.shape)

    if isinstance(tree.structure, int):
        return lane(tree.leaves[0], value)
    if tree.keys is not None:
        return {key: lane(leaf, value[key]) for key, leaf in zip(tree.keys, tree.leaves, strict=True)}
    raise ShardError("collect takes Box and Dict spaces, and those of one number; nest no further")
