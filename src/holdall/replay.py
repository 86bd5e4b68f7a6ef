"""ReplayMemory: exact off-policy experience in a fraction of the memory.

    add    -> storage: layout (check) -> store -> rings | segment, slices (write) -> tiers, sealer (compress, spill)
    sample -> sampling (recipe) -> storage: store -> rings | segment (find) -> delivery (batch)

Invariant: `gather(ids)` returns bit for bit what `add` was given. What does not fit is refused before it is written.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from holdall.base_memory import BaseMemory
from holdall.batch import Batch, Draw, as_ids, ids_of_any_shape, of_ids, require_in_range
from holdall.delivery import Delivery, DrawnRows, Loader, LoaderDraws, Prefetched, TensorFit, is_on_device
from holdall.errors import ArgumentError
from holdall.gymnasium import FIRST_LOOK_TICKS, Newest, added_resets, newest_ids, next_look, warn_of_resets
from holdall.native import fallback
from holdall.report import MemoryReport
from holdall.sampling import Prioritized, Uniform, drawn_from, require_enough, set_priorities
from holdall.schema import Array, Leaf, fit_flags, on_host, require_count
from holdall.storage import StepsLeft, Store, Tick, UnchangedStore, last_rows, steps_in

_PLAIN_SAMPLERS = frozenset({Uniform, Prioritized})
"""These draw once, and say nothing of a row but its id and weight."""


class ReplayMemory(BaseMemory):
    """Replay memory for `num_envs` lanes that advance together. All methods may be called from any thread.

    Args:
        observation_space: Any gymnasium Box, Discrete, MultiBinary, MultiDiscrete, Dict or Tuple; or the schema of
            another memory, which says all that this, `action_space`, `num_envs`, `extras` and `reward_shape` would.
        action_space: The same.
        capacity: Transitions over all lanes; rounded down to whole ticks. 1e6 is a million.
        num_envs: Lanes: the leading axis of everything that is added.
        budget: RAM that may be used. "8GiB" or bytes limits all that the memory holds; "auto" leaves the newest
            transitions raw, up to a quarter of the memory that is free when the first block is full, and compresses
            the rest; None compresses all.
        prefer: How much longer sampling may take when data is compressed: "speed" 1.2 times, "balanced" 2 times,
            "memory" 4 times.
        spill_dir: Where the oldest compressed transitions go that the budget does not hold. Without it, the oldest
            are dropped early when a limit is reached, see `report().capacity_that_fits`.
        device: None for NumPy batches; "cpu" or "cuda" for torch tensors there.
        store_device: "cuda" keeps every slice there, raw, and makes batches of them; the host keeps what `budget` says.
        seed: Seeds the sampler's generator.
        extras: Further fields per transition, by name.
        sampler: How `sample` draws; `Uniform()` by default.
        reward_shape: What one lane's reward is, beside a number: `(n,)` for one per agent or per objective.
    """

    _next_look: float = FIRST_LOOK_TICKS  # in ticks, see `_look_for_resets`

    def add(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any,
        extras: Mapping[str, Any] | None = None, valid: Any = None,
    ) -> None:  # fmt: skip
        """Add one transition per lane; every array has a leading axis of `num_envs`.

        With `num_envs=1` that axis may be left out: `add` takes what `env.step` gives. For every field the space's
        shape, and `reward_shape`, say whether the axis is there; a space of shape (1,) takes (1, 1) and (1,). Integers
        that fit into the space's integer dtype are taken whatever their own; nothing else is ever cast.

        Args:
            reward: The first one sets the dtype of all; Python numbers are float64.
            next_obs: The true next observation: at an episode's end its final one, not the first of the next episode.
            valid: Lanes marked False made no transition (the step after an episode's end in Gymnasium's next-step
                autoreset); they are never sampled and not counted.
        """
        if extras is None and valid is None:
            arguments = obs, action, reward, next_obs, terminated, truncated
            if self.add_at_once(*arguments) or self.add_as_is(*arguments):
                return
        self._open().wait_for_room()
        with self._locked():
            tick = self._fit((self.num_envs,), obs, action, reward, next_obs, terminated, truncated, extras, valid)
            self._whole().write(tick)

    def extend(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any,
        extras: Mapping[str, Any] | None = None, valid: Any = None,
    ) -> None:  # fmt: skip
        """Add whole trajectories: the same as `add`, with a leading time axis before the lanes.

        Everything is checked before the first step is written. An interrupt waits until the last one is; a second
        interrupt leaves the first steps, each of them whole.
        """
        with self._locked():
            leading = (steps_in(reward), self.num_envs)
            steps = self._fit(leading, obs, action, reward, next_obs, terminated, truncated, extras, valid)
        self._write_steps(StepsLeft(steps))

    def _fit(self, leading: tuple[int, ...], *arguments: Any) -> Tick:
        """Check every argument; nothing is written if one does not fit."""
        store = self._open()
        reward_dtype, self.add_at_once = store.reward_dtype, store.fast_tick.add
        may_live_there = self._settings["store_device"] is not None
        if may_live_there and (self._tensor_fit is not None or is_on_device(self._delivery, arguments[0])):
            return self._fit_tensors(leading, reward_dtype, arguments)
        tick = Tick.fitted(self.schema, leading, reward_dtype, *arguments)
        if reward_dtype is None and (self._settings["device"] or self._settings["store_device"]):
            self._delivery.require(self.schema.reward_leaf(tick.reward.dtype, "reward"))
        return tick

    def _write_steps(self, left: StepsLeft, *, waits: bool = True) -> None:
        """Write all steps, and let others in when blocks pile up; the first interrupt waits for the last step."""
        try:
            while left:
                with self._locked():
                    store = self._whole()
                    left.write(store)
                store.wait_for_room()
        except BaseException:
            if waits:
                self._write_steps(left, waits=False)
            raise

    def _fit_tensors(self, leading: tuple[int, ...], reward_dtype: Any, arguments: tuple[Any, ...]) -> Tick:
        """Check tensors on the store's device; the first of them say that everything lives there."""
        fit = self._tensor_fit or TensorFit(self._delivery, self.schema)
        tick = fit.tick(leading, reward_dtype, *arguments)
        if self._tensor_fit is None:
            if self._open().next_tick:
                raise ArgumentError(
                    f"obs is on {fit.device}, but the memory was begun with arrays of the host; go on with these, or "
                    "make a new memory"
                )
            self._move_to_device(fit, tick)
        return tick

    def sample(self, batch_size: int) -> Batch:
        """Draw `batch_size` transitions with the memory's sampler."""
        require_count("batch_size", batch_size, 1)
        if self._open().next_tick >= self._next_look:
            self._look_for_resets()
        is_plain = type(self.sampler) in _PLAIN_SAMPLERS and self._batches.takes_arrays
        with self._locked():
            store = self._whole()
            batch = self._batches.draw(self.sampler, batch_size, self._generator, store) if store.next_tick else None
            if batch is not None:
                return batch
            draw = self._draw(store, batch_size, batch_size)
            drawn = None if is_plain else self._batches.look_up(draw, store)
        if drawn is None:
            arrays = store.batch_reader.gather(draw.ids)  # in one call, if there is such a way
            if type(arrays) is tuple:
                return self._batches.of_arrays(draw, arrays)
            with self._locked():
                store = self._whole()
                if draw.ids.min() < store.held[0]:  # another thread added meanwhile
                    draw = self._draw(store, batch_size, batch_size)
                drawn = self._batches.look_up(draw, store)
                store.offer_batches(batch_size)
        return self._batches.make(draw, drawn)

    def _look_for_resets(self) -> None:
        """Warn, once, of resets that were added as steps."""
        with self._locked():
            store, complete, leaves = self._whole(), self._assembler.complete, self.schema.observation.leaves
            self._next_look, found = next_look(store.next_tick), None
            if self._resident is None and store.all_valid:
                ids = newest_ids(self.first_id, self.next_id, self.num_envs)
                found = added_resets(Newest(ids, store.outcomes, lambda ids: complete(store.read(ids), leaves)))
        if found is not None:
            self._next_look = warn_of_resets(found, stacklevel=4)

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order."""
        return self.follow(of_ids(as_ids(ids)))

    def loader(self, batch_size: int, prefetch: int = 2, device: str | None = None) -> Loader:
        """Return an endless iterator over batches of `batch_size`, made ahead in the background.

        A batch is drawn when the one `prefetch` before it is asked for, so one seed gives one sequence of batches.
        What is added or prioritised later is not in it. `prefetch=0` is as `sample`.

        Args:
            prefetch: Batches under way besides the one asked for; each takes the memory of a batch.
            device: Where batches are wanted; the memory's own device by default.
        """
        require_count("batch_size", batch_size, 1)
        require_count("prefetch", prefetch, 0)
        is_own = device is None or device == self._settings["device"]
        batches = self._batches if is_own else self._batches_to(Delivery(device, self.schema.leaves))

        def look_up(draws: LoaderDraws) -> tuple[Draw, DrawnRows]:
            with self._locked():
                store = self._whole()
                draw = draws.next_held(self._held(store)) or self._draw(store, batch_size, batch_size)
                rows = batches.look_up(draw, store, ahead=prefetch > 0)
                draws.begin(draw)
                return draw, rows

        self._prefetched = self._prefetched or Prefetched()
        return self._prefetched.new_loader(batches, look_up, batch_size, prefetch, None if is_own else batches.close)

    def draw(self, batch_size: int) -> Draw:
        """Draw as `sample` does, more rows than there are if need be, and return the recipe alone; for adapters."""
        require_count("batch_size", batch_size, 1)
        with self._locked():
            return self._draw(self._whole(), batch_size, 1)

    def outcomes(self, ids: Any) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return rewards, terminated and truncated of `ids`, of any shape; no observation is touched."""
        with self._locked():
            store, wanted = self._whole(), ids_of_any_shape(ids)
            self._held(store).require(wanted)
            return store.outcomes(wanted)

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """Set the priorities of transitions, such as the sizes of their TD errors.

        Args:
            ids: Of a batch, as they are; those that were evicted since are ignored.
            priorities: Numbers of at least 0, one a row of the batch.
        """
        with self._locked():
            store = self._whole()
            if self._resident is None or not self._resident.update_priorities(self.sampler, ids, priorities):
                set_priorities(self.sampler, self._held(store), ids, priorities)

    def update(self, ids: Any, /, **columns: Any) -> None:
        """Rewrite extras of transitions that are held: recurrent states, latents, values that were computed again.

        Batches that were handed out, or drawn ahead by a loader, keep what they were given.

        Args:
            ids: Of transitions; of sequences, `batch.ids[batch.mask]`. If one comes twice, its last row counts.
            columns: New rows by the name of their extra, one per id, of the extra's own shape and dtype.
        """
        self._open()
        fit, wanted = self._tensor_fit, as_ids(on_host(ids))
        if not columns:
            raise ArgumentError("update was given no rows; name an extra: update(ids, hidden=...)")
        rows = self.schema.extras.flatten_some(columns, wanted.shape, _fit_rows if fit is None else fit.rows)
        wanted, copies = last_rows(wanted, {f"extras.{leaf}": new for leaf, new in rows.items()})
        with self._locked():
            store = self._whole()
            self._held(store).require(wanted)
            store.rewrite(wanted, copies)
            if "_batches" in vars(self):
                self._batches.rewritten(wanted)

    def extra(self, name: str, ids: Any) -> Array:
        """Return one extra of `ids`, of any shape; nothing else is read. For adapters."""
        with self._locked():
            store, wanted = self._whole(), ids_of_any_shape(ids)
            self._held(store).require(wanted)
            return store.extra((self.schema.extras.keys or ()).index(name), wanted)

    def set_flags(self, ids: Any, terminated: Any, truncated: Any) -> None:
        """Overwrite how transitions ended: some frameworks cut the last episode afterwards."""
        wanted = as_ids(ids)
        ended = fit_flags(terminated, wanted.shape, "terminated", "one flag per id")
        cut = fit_flags(truncated, wanted.shape, "truncated", "one flag per id")
        with self._locked():
            store = self._whole()
            self._held(store).require(wanted)
            store.set_flags(wanted, ended, cut)

    def __len__(self) -> int:
        """Count the transitions that can be sampled."""
        with self._locked():
            return self._whole().transitions

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field, against the plain layout."""
        with self._locked():
            store = self._whole()
            return MemoryReport(
                transitions=store.transitions, fields=tuple(store.report()), segments=store.segments,
                staging_bytes=self._staged_bytes,
                backlog=store.backlog, failure=store.failure,
                budget_bytes=self._budget.limit, capacity_that_fits=store.capacity_that_fits, fallback=fallback(),
            )  # fmt: skip

    def relieve(self, nbytes: int) -> None:
        """Hold that much less in memory, if no transition is lost: raw data is compressed, with `spill_dir` spilled."""
        require_count("nbytes", nbytes, 0)
        with self._locked():
            self._whole().relieve(int(nbytes))

    @property
    def disk_bytes(self) -> int:
        """Bytes in files of `spill_dir`."""
        with self._locked():
            return 0 if self._store is None else self._store.disk_bytes

    def are_valid(self, ids: Any) -> NDArray[np.bool_]:
        """Tell which of some held ids are transitions: lanes added with valid=False made none."""
        with self._locked():
            store, wanted = self._whole(), as_ids(ids)
            require_in_range(wanted, store.first_tick * self.num_envs, store.next_tick * self.num_envs)
            return store.are_valid(wanted)

    def __getstate__(self) -> dict[str, Any]:
        """Return the content as arrays that pickle protocol 5 writes without copying them."""
        with self._locked():
            if self._resident is not None:
                self._resident.bring_back()
            store = self._whole()
            made_of = {"schema": self.schema, "capacity": self.capacity, "settings": self._settings}
            draws = {"generator": self._generator, "sampler": self.sampler}
            held = {"store": store.content(), "rows": store.rows()}
            return made_of | draws | held | {"unchanged": UnchangedStore(store)}  # last: written when all the rest was

    def __setstate__(self, state: dict[str, Any]) -> None:
        schema, capacity, settings = state["schema"], state["capacity"], state["settings"]
        ReplayMemory.__init__(self, schema, None, capacity, sampler=state["sampler"], **settings)
        self._generator = state["generator"]
        self._choose_home(state["store"])
        with self._locked():  # the sealer may be at the first block before all are taken over
            self._open().thaw(state["store"], state["rows"])

    def __copy__(self) -> Self:
        """Return a memory of its own, as `copy.deepcopy` does: two memories cannot share a sampler and a generator."""
        return copy.deepcopy(self)

    def _draw(self, store: Store, count: int, least: int) -> Draw:
        """Draw rows, if so many transitions at least are held."""
        require_enough(count, store.transitions, least)
        if type(self.sampler) not in _PLAIN_SAMPLERS or not store.all_valid:
            store.repair.begin(functools.partial(setattr, bits := self._generator.bit_generator, "state", bits.state))
        draw = None if self._resident is None else self._resident.recipe(self.sampler, count, self._generator)
        draw = draw or drawn_from(self.sampler, self._held(store), count, self._generator)
        store.repair.end()
        return draw


def _fit_rows(leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Array:
    return leaf.fit(on_host(value), leading, argument, "one row per id")
