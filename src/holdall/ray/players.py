"""Collecting: actors that play, and feed a memory over shards.

In:  a way to make an environment and one to choose actions.  Out: transitions in the memory; progress.
Invariant: an actor that dies is started again by Ray and plays on with a new writer; what it had not sent is lost with
it, and nothing is added twice. Actors wait when the shards or the limiter do, however long, and play on when they are
back.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import ray

from holdall.cluster.memory import ReplayMemory
from holdall.cluster.writer import Writer
from holdall.errors import ShardError
from holdall.schema import Array, Leaf, Tree, require_count

_TRY_AGAIN_S = 1.0
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
        work = (env_fn, make_act, writer, seed + number)
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

    def stop(self) -> None:
        """End after the step that it is at, and send what waits."""
        self._stopped.set()
        self._thread.join()

    def _run(self, env_fn: Callable[[], Any], make_act: MakeAct | None, writer: Writer, seed: int) -> None:
        try:
            env = env_fn()
            env.action_space.seed(seed)
            act = (lambda _: env.action_space.sample()) if make_act is None else make_act(self._number)
            self._play(env, act, writer, seed)
            writer.close()
            env.close()
        except Exception as error:
            with self._lock:
                self._failure = error

    def _play(self, env: Any, act: Any, writer: Writer, seed: int) -> None:
        schema = writer.schema
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
            while not self._is_added(writer, step):
                if self._stopped.is_set():
                    return
            played += float(reward)
            ended = terminated or truncated
            with self._lock:
                self._progress.steps += 1
                self._progress.episodes += ended
                if ended:
                    self._returns.append(played)
            obs, played = (env.reset()[0], 0.0) if ended else (next_obs, played)

    def _is_added(self, writer: Writer, step: tuple[Any, ...]) -> bool:
        """Add a step, unless the shards do not take it now; then it is added again later."""
        try:
            writer.add(*step)
        except ShardError as error:
            _LOG.warning("actor %d waits to add a step: %s", self._number, error)
            self._stopped.wait(_TRY_AGAIN_S)
            return False
        return True


class Collection:
    """Actors that play until they are stopped; also a context manager."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors

    def send(self, weights: Any) -> None:
        """Have all actors choose with these weights from now on; they are sent once for all."""
        shared = ray.put(weights)
        for actor in self._actors:
            actor.load.remote(shared)

    def progress(self) -> list[CollectProgress]:
        """Say how far every actor is; raise what went wrong with one."""
        found: list[CollectProgress] = []
        for actor in self._actors:
            try:
                found.append(ray.get(actor.progress.remote()))
            except ray.exceptions.RayTaskError as error:
                raise ShardError(str(getattr(error, "cause", error))) from error
            except ray.exceptions.RayActorError:  # it is being started again
                found.append(CollectProgress())
        return found

    def stop(self, timeout_s: float = 30.0) -> None:
        """End all actors once they have sent what waits."""
        actors, self._actors = self._actors, []
        ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=timeout_s)
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
