"""DeviceStore: every transition of a memory, on one torch device.

    append -> TensorCheck or check_step -> TickRing.write -> Tensors.write
    sample -> DeviceSampler.draw -> Tensors.read

Neither call waits for the device. The first ticks are an exception: the store looks at them to decide how observations
are cut into slices. Transitions may be added as tensors on the device or as arrays of the host.

Guarantee: rows are returned bit for bit. A tick is held when it was written completely, so an interrupt leaves the tick
held or not held.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw, Goals, import_torch, require_in_range
from holdall.delivery import check_device
from holdall.delivery.batch_builder import BatchBuilder
from holdall.delivery.delivery import compute_rewards, find_goal_leaves
from holdall.delivery.drawn_rows import DrawnRows, map_arrays
from holdall.errors import ArgumentError, HoldallError
from holdall.memory_registry import PressureCheck
from holdall.report import FieldReport, field_name
from holdall.sampling import Held, check_priorities, draw_from, require_enough
from holdall.schema import Array, Leaf, Schema
from holdall.store.budget import Budget
from holdall.store.columns import Columns
from holdall.store.step import Step
from holdall.store.store import Store
from holdall.store.tuning import Tuning
from holdall.store.windows import Window, WindowDetector
from holdall.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

    from holdall.device.ring import TickRing
    from holdall.device.samplers import DeviceDraw, DeviceSampler
    from holdall.device.tensors import TensorPlan, Tensors, TensorStep

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]

_SEARCHED_TICKS = 64
"""Ticks after which the search for windows ends."""
_MIN_ESTIMATED_TICKS = 32
"""Minimum number of ticks from which the frequency of new episodes is estimated."""
_MIN_SLICE_BYTES = 64
"""Observations with shorter slices are stored whole: finding the slices takes longer than copying the observation."""
_CHUNK_BYTES = 64 * 2**20
"""Bytes of transitions that are copied between host and device at once."""
_REWARD = Leaf("", (), np.dtype(np.float32))
"""The assumed reward until the first reward sets the dtype."""


class DeviceBudget(NamedTuple):
    """How many bytes of the device a memory may use."""

    max_bytes: int | None  # None: all memory of the device.


class DeviceStore:
    """Every field of every transition of one memory, on one device. All methods may be called from any thread.

    Args:
        capacity_ticks: Maximum number of ticks that are held.
        device: Name of a torch device.
        budget: Bytes that may be used on the device. None or "auto": all of its memory.

    Attributes:
        schema: Spaces of all fields.
        columns: Numbers of the columns and of their outputs.
        budget: Bytes that may be used on the device.
        device: The torch device.
        lanes: Number of lanes.
        capacity: Maximum number of transitions that are held.
        flags_changed: A number that every call of `set_flags` changes.
    """

    def __init__(
        self,
        schema: Schema,
        capacity_ticks: int,
        device: str,
        budget: str | int | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        check_device(device, "store_device")
        from holdall.delivery.device import find_device, require_torch_dtype  # noqa: PLC0415  They import torch.
        from holdall.delivery.staging import is_asynchronous  # noqa: PLC0415
        from holdall.device.arguments import TensorCheck  # noqa: PLC0415

        for leaf in schema.leaves:
            require_torch_dtype(leaf, device)
        self.schema = schema
        self.columns = Columns(schema)
        limit = None if budget is None or budget == "auto" else parse_bytes(budget, "budget")
        self.budget = DeviceBudget(limit)
        self.device: torch.device = find_device(device)
        self.lanes = schema.num_envs
        self.capacity = capacity_ticks * schema.num_envs
        self.flags_changed = 0
        self._torch = import_torch()
        self._capacity_ticks = capacity_ticks
        self._tuning = tuning or Tuning()
        self._check = TensorCheck(schema, self.device)
        self._builder = BatchBuilder(schema)
        self._lock = threading.RLock()
        self._has_streams = is_asynchronous(self.device)
        self._stream: Any = None  # Stream of the last operation.
        self._change: Any = None  # Weak reference to the mark of the call that changes the store, see `_change_alone`.
        self._valid_count = (0, 0)  # Result of the last count of transitions, and `first_id` at that time.
        self._ring: TickRing | None = None  # None before the first tick.
        self._is_settled = False  # Whether the ring has the full capacity, and the windows that were found.
        self._start_tick = 0  # First tick of the ring, which is made when the first tick is added.
        self._sampler: tuple[Any, DeviceSampler] | None = None  # The sampler that drew last, and its device version.
        self._host: Store | None = None  # Copy of the transitions on the host, see `snapshot`.
        self._detectors = {
            i: WindowDetector(leaf, self._tuning)
            for i, leaf in enumerate(schema.observation.leaves)
            if leaf.nbytes > self._tuning.tiny_field_bytes
        }
        self._is_searching = any(detector.is_searching for detector in self._detectors.values())
        if not self._is_searching:
            self._require_room(self._make_plan(self._capacity_ticks, _REWARD))

    # ---------------------------------------------------------------- which transitions are held

    @property
    def first_tick(self) -> int:
        """Number of the oldest tick that is held."""
        return self._start_tick if self._ring is None else self._ring.first_tick

    @property
    def next_tick(self) -> int:
        """Number of the tick that is written next."""
        return self._start_tick if self._ring is None else self._ring.next_tick

    @property
    def first_id(self) -> int:
        """The oldest transition id that is held."""
        return self.first_tick * self.lanes

    @property
    def next_id(self) -> int:
        """The id of the transition that is written next."""
        return self.next_tick * self.lanes

    @property
    def bounds(self) -> tuple[int, int]:
        """The ids `first_id` and `next_id`."""
        ring = self._ring
        if ring is None:
            return self.first_id, self.next_id
        return ring.first_tick * self.lanes, ring.next_tick * self.lanes

    @property
    def all_valid(self) -> bool:
        """Whether every entry is a transition. False if an entry may not be one."""
        ring = self._ring
        return ring is None or ring.masked_tick < 0 or ring.masked_tick < ring.first_tick

    @property
    def reward_dtype(self) -> np.dtype[Any] | None:
        """Dtype of all rewards, which the first reward sets. None if nothing was added."""
        if self._ring is None or self._ring.next_tick == self._ring.base_tick:
            return None
        return self._ring.tensors.plan.reward.dtype

    @property
    def held_count(self) -> int:
        """Number of entries that are held. Some of them may not be transitions."""
        first_id, next_id = self.bounds
        return next_id - first_id

    def __len__(self) -> int:
        """Return the number of transitions. Waits for the device if entries were added with `valid`."""
        with self._lock:
            self._order_streams()
            count = self.next_id - self.first_id
            if self.all_valid:
                return count
            tensors = self.tensors
            ids = self._torch.arange(self.first_id, self.next_id, device=self.device)
            return count - int(tensors.are_invalid(ids % tensors.cells).sum())

    def view(self) -> DeviceStore:
        """Return this store, which serves as its own view: every method reads the newest transitions."""
        return self

    @property
    def tensors(self) -> Tensors:
        """All fields. Raise ArgumentError if nothing was added."""
        if self._ring is None:
            raise ArgumentError("Nothing was added yet. Add transitions first.")
        return self._ring.tensors

    def compute_bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `first_id` and `next_id` as tensors that every replay of a CUDA graph computes again.

        All values that change while the memory is used must be tensors here, because a graph never updates numbers.
        """
        next_tick = self.tensors.next_tick
        first_tick = (next_tick - self._capacity_ticks).clamp(min=self._start_tick)
        return first_tick * self.lanes, next_tick * self.lanes

    # ---------------------------------------------------------------- writing

    def append(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Any = None,
        valid: Any = None,
    ) -> None:
        """Write one tick, or raise ArgumentError and write nothing."""
        given = (obs, action, reward, next_obs, terminated, truncated, extras, valid)
        self._change_alone(lambda: self._write_tick(self._check.check_tick(self.reward_dtype, given)))

    def extend(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Any = None,
        valid: Any = None,
    ) -> None:
        """Write whole trajectories: the arguments of `append` with a leading time axis.

        All arguments are checked before the first step is written. Every step is written completely or not at all.
        """
        given = (obs, action, reward, next_obs, terminated, truncated, extras, valid)
        self._change_alone(lambda: self._write(self._check.check_ticks(self.reward_dtype, given)))

    def _write_tick(self, step: TensorStep) -> None:
        """Write one checked tick, without an axis of time."""
        if self._is_settled and self._ring is not None:
            self._ring.write_tick(step)
        else:
            self._write(step.add_time_axis())

    def _write(self, step: TensorStep) -> None:
        """Write checked ticks."""
        written = 0
        count = len(step.reward)
        while written < count:
            ring = self._prepare(step)
            if not self._is_searching:
                ring.write(step if written == 0 else step.cut(written, count))
                return
            part = step.cut(written, min(count, written + _SEARCHED_TICKS - (ring.next_tick - ring.base_tick)))
            ring.write(part)
            written += len(part.reward)
            self._search_windows(part)

    def _prepare(self, step: TensorStep) -> TickRing:
        """Return the ring to write to. Until the search for windows is over, the ring is small."""
        ring = self._ring
        if ring is None or ring.next_tick == ring.base_tick:
            dtype = self._check.find_numpy_dtype(step.reward)
            ticks = min(self._capacity_ticks, _SEARCHED_TICKS) if self._is_searching else self._capacity_ticks
            ring = self._new_ring(self._make_plan(ticks, self.schema.reward_leaf(dtype)))
            self._ring = ring
        elif not self._is_searching and not self._has_plan(ring):
            ring = self._settle(ring)
            self._ring = ring
        self._is_settled = not self._is_searching
        return ring

    def rewrite(self, ids: Ids, rows: Mapping[int, Any]) -> None:
        """Overwrite rows of extras. `rows` has them by the number of the extra.

        Of equal ids the last one counts. Raise TransitionIdError if an id is not held.
        """
        self._change_alone(lambda: self._rewrite(*_find_last(ids), rows))

    def _rewrite(self, ids: Ids, order: NDArray[np.intp], rows: Mapping[int, Any]) -> None:
        require_in_range(ids, self.first_id, self.next_id)
        tensors = self.tensors
        cells = self._to_device(ids) % tensors.cells
        host = self._host
        self._host = None  # If an interrupt ends this call, the next snapshot copies everything from the device.
        for number, given in rows.items():
            new = self._to_device(given) if isinstance(given, np.ndarray) else given
            tensors.extras[number].put(cells, new, self._to_device(order))
            if host is not None:
                is_saved = ids < host.next_id
                kept = new.cpu().numpy()[order][is_saved]
                host.rewrite(ids[is_saved], {number: np.ascontiguousarray(kept)})
        self._host = host

    def set_flags(self, ids: Ids, terminated: Flags, truncated: Flags) -> None:
        """Overwrite the flags of transitions. Of equal ids the last one counts.

        Raise TransitionIdError if an id is not held.
        """
        unique, order = _find_last(ids)
        self._change_alone(lambda: self._set_flags(unique, terminated[order], truncated[order]))

    def _set_flags(self, ids: Ids, terminated: Flags, truncated: Flags) -> None:
        require_in_range(ids, self.first_id, self.next_id)
        tensors = self.tensors
        cells = self._to_device(ids) % tensors.cells
        host = self._host
        self._host = None  # If an interrupt ends this call, the next snapshot copies everything from the device.
        # The number is increased before the change, because an interrupt may skip the second increase, and after the
        # change, because a signal handler may draw in between.
        self.flags_changed += 1
        tensors.ends.put(cells, self._to_device(np.stack([terminated, truncated])))
        self.flags_changed += 1
        if host is not None:
            is_saved = ids < host.next_id
            host.set_flags(ids[is_saved], terminated[is_saved], truncated[is_saved])
        self._host = host

    def fit_rows(self, leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Any:
        """Return new rows of an extra as a tensor on the device or an array. Raise ArgumentError if they do not fit."""
        if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
            return self._check.check_rows(leaf, value, leading, argument)
        return leaf.fit(value, leading, argument, "one row per id")

    # ---------------------------------------------------------------- room on the device

    def _make_plan(self, ticks: int, reward: Leaf, slices_per_tick: tuple[float, ...] | None = None) -> TensorPlan:
        """Return the sizes of the tensors for `ticks` ticks, with the windows that were found so far."""
        from holdall.device.tensors import TensorPlan  # noqa: PLC0415

        windows = tuple(self._find_window(i) for i in range(len(self.schema.observation.leaves)))
        return TensorPlan(ticks, windows, slices_per_tick or tuple(float(window.shift) for window in windows), reward)

    def _find_window(self, leaf: int) -> Window:
        detector = self._detectors.get(leaf)
        window = None if detector is None or self._is_searching else detector.window
        if window is None or window.slice_bytes < _MIN_SLICE_BYTES:
            return Window.whole(self.schema.observation.leaves[leaf])
        return window

    def _require_room(self, plan: TensorPlan) -> None:
        """Raise ArgumentError if the tensors do not fit into the budget or the device."""
        needed = plan.nbytes(self.schema)
        if needed > self._count_usable_bytes(needed):
            raise self._explain_lack_of_room(plan)

    def _count_usable_bytes(self, needed: int) -> int:
        """Return how many bytes of the device may be used, or `needed` if neither torch nor the budget limits them."""
        room = needed
        if self.device.type == "cuda":
            room = int(self._torch.cuda.mem_get_info(self.device)[0])
        limit = self.budget.max_bytes
        return room if limit is None else min(limit, room)

    def _explain_lack_of_room(self, plan: TensorPlan) -> ArgumentError:
        """Return the error to raise if the tensors do not fit. It names the capacity that fits."""
        needed = plan.nbytes(self.schema)
        room = self._count_usable_bytes(needed)
        ticks = range(1, plan.capacity_ticks)
        fitting = bisect.bisect_right(ticks, room, key=lambda n: plan._replace(capacity_ticks=n).nbytes(self.schema))
        why = "are allowed by budget" if room == self.budget.max_bytes else "are free"
        advice = f"capacity={fitting * self.lanes} fits."
        if fitting == 0:
            advice = f"Even capacity={self.lanes} does not fit. Leave store_device out to use the memory of the host."
        return ArgumentError(
            f"capacity ({self.capacity}) takes {format_bytes(needed)} on {self.device}, where {format_bytes(room)} "
            f"{why}. {advice}"
        )

    def _new_ring(self, plan: TensorPlan) -> TickRing:
        """Return an empty ring. Raise ArgumentError if the device has no room for it."""
        from holdall.device.ring import TickRing  # noqa: PLC0415

        self._require_room(plan)
        try:
            return TickRing(self.schema, plan, self.device, self.first_tick)
        except self._torch.OutOfMemoryError as error:
            raise self._explain_lack_of_room(plan) from error

    # ---------------------------------------------------------------- windows

    def _search_windows(self, step: TensorStep) -> None:
        """Pass ticks to all detectors. End the search if all have decided, or after `_SEARCHED_TICKS`."""
        lanes = self._tuning.detector_lanes
        for i, detector in self._detectors.items():
            obs = step.obs[i][:, :lanes].cpu().numpy()
            next_obs = step.next_obs[i][:, :lanes].cpu().numpy()
            for before, after in zip(obs, next_obs, strict=True):
                detector.look(before, after)
        is_over = self.next_tick - self._start_tick >= _SEARCHED_TICKS
        if is_over or not any(detector.is_searching for detector in self._detectors.values()):
            self._is_searching = False

    def _has_plan(self, ring: TickRing) -> bool:
        """Return whether a ring has the full capacity, and the windows that were found."""
        plan = ring.tensors.plan
        windows = tuple(self._find_window(i) for i in range(len(plan.windows)))
        return plan.capacity_ticks == self._capacity_ticks and plan.windows == windows

    def _settle(self, before: TickRing) -> TickRing:
        """Return a ring of the full capacity, with the windows that were found and the ticks that are held."""
        plan = self._make_plan(self._capacity_ticks, before.tensors.plan.reward)
        plan = plan._replace(slices_per_tick=self._estimate_slices(before, plan))
        after = self._new_ring(plan)
        for tick in range(before.first_tick, before.next_tick):
            after.write(self._read_ticks(before.tensors, tick, tick + 1))
        return after

    def _estimate_slices(self, before: TickRing, plan: TensorPlan) -> tuple[float, ...]:
        """Return an estimate, from the first ticks, of how many slices a tick of one lane writes, for every leaf."""
        ticks = before.next_tick - before.first_tick
        if ticks < _MIN_ESTIMATED_TICKS:
            return plan.slices_per_tick
        used = before.tensors.measure(before.next_tick, before.first_tick).tolist()
        estimates = []
        for window, (slices, _) in zip(plan.windows, used, strict=True):
            # Until now, every observation was stored whole. A slice is an observation that does not equal the next
            # observation of the tick before: the first one of every lane, and one after every break.
            breaks = max(0.0, (slices / self.lanes - 1) / ticks)
            estimates.append(window.shift + breaks * window.count)
        return tuple(estimates)

    # ---------------------------------------------------------------- drawing

    def sample(self, sampler: Any, count: int, generator: np.random.Generator) -> Batch:
        """Draw a batch. Samplers without a version for devices draw on the host."""
        with self._lock:
            is_capturing = self._order_streams()
            self._require_transitions(count)
            device_sampler = self._find_sampler(sampler)
            if device_sampler is None:
                return self.deliver(self._draw_on_host(sampler, count, generator))
            seed = int(generator.bit_generator.random_raw())
            try:
                drawn = device_sampler.draw(count, seed, is_capturing=is_capturing)
                return self._make_batch(drawn, drawn.ids, None)
            except self._torch.OutOfMemoryError as error:
                raise self._explain(count, error) from error

    def draw(self, sampler: Any, count: int, generator: np.random.Generator) -> Draw:
        """Draw as `sample` does, and return the draw on the host. Waits for the device."""
        with self._lock:
            is_capturing = self._order_streams()
            self._require_transitions(count)
            device_sampler = self._find_sampler(sampler)
            if device_sampler is None:
                return self._draw_on_host(sampler, count, generator)
            seed = int(generator.bit_generator.random_raw())
            drawn = device_sampler.draw(count, seed, is_capturing=is_capturing)
            arrays: list[Any] = [None if tensor is None else tensor.cpu().numpy() for tensor in drawn]
            return Draw(*arrays)

    def _draw_on_host(self, sampler: Any, count: int, generator: np.random.Generator) -> Draw:
        held = Held(self.first_id, self.next_id, self.lanes, self.capacity, self)
        return draw_from(sampler, held, count, generator)

    def deliver(self, draw: Draw) -> Batch:
        """Return the batch of a draw whose arrays are on the host. Raise TransitionIdError if a row is not held."""
        from holdall.device.samplers import DeviceDraw  # noqa: PLC0415

        with self._lock:
            self._order_streams()
            goals = draw.goals
            for ids in (draw.ids, draw.last_ids, None if goals is None else goals.ids):
                if ids is not None:
                    require_in_range(ids, self.first_id, self.next_id)
            others = (draw.last_ids, draw.reward, draw.discount, draw.mask)
            try:
                moved = [None if array is None else self._to_device(array) for array in others]
                drawn = DeviceDraw(self._to_device(draw.ids), self._to_device(draw.weights), *moved)
                return self._make_batch(drawn, draw.ids, draw.goals)
            except self._torch.OutOfMemoryError as error:
                raise self._explain(len(draw.ids), error) from error

    def _explain(self, rows: int, error: torch.OutOfMemoryError) -> ArgumentError:
        """Return the error to raise if the device has no memory for a batch."""
        from holdall.delivery.staging import describe_lack_of_memory  # noqa: PLC0415  It imports torch.

        return ArgumentError(describe_lack_of_memory(rows, self.device, error))

    def _make_batch(self, drawn: DeviceDraw, ids: Any, goals: Goals | None) -> Batch:
        """Return the batch of a draw. `ids` become the batch's ids, on the device or on the host."""
        is_flat = drawn.ids.ndim == 1
        rows = self.tensors.read(drawn.ids if is_flat else drawn.ids.view(-1), drawn.last_ids)
        if drawn.reward is not None:
            rows = rows._replace(reward=drawn.reward)
        if goals is not None and goals.rows.size:
            self._relabel(goals, rows)
        if not is_flat:
            rows = rows.reshape(tuple(drawn.ids.shape))
        return self._builder.build(rows, ids, drawn.weights, drawn.discount, drawn.mask)

    def _relabel(self, goals: Goals, rows: DrawnRows) -> None:
        """Replace the goals of some rows, and their rewards. The user's reward function runs on the host."""
        achieved, desired = find_goal_leaves(self.schema, goals)
        tensors = self.tensors
        positions = self._to_device(goals.rows)
        cells = self._to_device(goals.ids) % tensors.cells
        goal = tensors.read_observations(cells, cells, [achieved])[1][0]
        rows.obs[desired][positions] = goal
        rows.next_obs[desired][positions] = goal
        extras = [tensor[positions].cpu().numpy() for tensor in rows.extras]
        reached = rows.next_obs[achieved][positions].cpu().numpy()
        rewards = compute_rewards(self.schema, goals, reached, goal.cpu().numpy(), extras)
        rows.reward[positions] = self._to_device(rewards).to(rows.reward.dtype)

    def _require_transitions(self, count: int) -> None:
        """Raise ArgumentError if there are no transitions. Wait for the device only if the host cannot tell."""
        first_id, next_id = self.bounds
        if self.all_valid:
            require_enough(count, next_id - first_id, 1)
            return
        # At most `first_id - counted_at` of the transitions that were counted have been evicted since.
        counted, counted_at = self._valid_count
        if counted <= first_id - counted_at:
            self._valid_count = (len(self), first_id)
            require_enough(count, self._valid_count[0], 1)

    # ---------------------------------------------------------------- priorities

    def update_priorities(self, sampler: Any, ids: Any, priorities: Any) -> None:
        """Set priorities. If they are tensors, errors are raised later, by `bring_back_priorities`."""
        torch = self._torch
        with self._lock:
            self._order_streams()
            device_sampler = self._find_sampler(sampler)
            if device_sampler is None or device_sampler.priorities is None:
                wanted, values = check_priorities(sampler, ids, priorities)
                held = Held(self.first_id, self.next_id, self.lanes, self.capacity, self)
                sampler.update_priorities(held, wanted, values)
                return
            if not any(isinstance(given, torch.Tensor) for given in (ids, priorities)):
                ids, priorities = check_priorities(sampler, ids, priorities)
                sampler.check_update(ids, priorities)
            ids = torch.as_tensor(ids, device=self.device)
            device_sampler.update(ids, torch.as_tensor(priorities, device=self.device))

    def bring_back_priorities(self, sampler: Any) -> None:
        """Copy the priorities to the sampler on the host. Call this before the sampler is saved or copied."""
        with self._lock:
            self._order_streams()
            if self._sampler is not None and self._sampler[0] is sampler and self._sampler[1].priorities is not None:
                self._sampler[1].priorities.bring_back()

    def _find_sampler(self, sampler: Any) -> DeviceSampler | None:
        """Return the version of `sampler` that draws on the device. Return None if it draws on the host."""
        if self._sampler is not None and self._sampler[0] is sampler:
            return self._sampler[1]
        from holdall.device.samplers import DeviceSampler, can_draw_on_device  # noqa: PLC0415

        if not can_draw_on_device(sampler):
            return None
        self._sampler = (sampler, DeviceSampler(sampler, self))
        return self._sampler[1]

    # ---------------------------------------------------------------- reading on the host

    def read(self, ids: Ids, outputs: tuple[int, ...], into: NDArray[np.uint8] | None = None) -> tuple[Array, ...]:
        """Return the rows of `ids` as arrays, one per output of `Columns`. Raise TransitionIdError.

        `into` is ignored: the arrays have memory of their own.
        """
        del into
        with self._lock:
            self._order_streams()
            require_in_range(ids, self.first_id, self.next_id)
            tensors = self.tensors
            cells = self._to_device(ids) % tensors.cells
            leaves = sorted({output // 2 for output in outputs if output < 2 * len(tensors.fields)})
            obs, next_obs = tensors.read_observations(cells, cells, leaves)
            pairs = dict(zip(leaves, zip(obs, next_obs, strict=True), strict=True))
            return tuple(self._read_output(output, cells, pairs).cpu().numpy() for output in outputs)

    def read_windows(self, ids: Ids, leaf: int, into: NDArray[np.uint8], with_whole: bool = False) -> None:
        """Return None: slices stay on the device."""

    def _read_output(self, output: int, cells: torch.Tensor, pairs: dict[int, Any]) -> torch.Tensor:
        tensors = self.tensors
        columns = self.columns
        column, is_second = divmod(output, 2)
        if column in pairs:
            found: torch.Tensor = pairs[column][is_second]
            return found
        if column == columns.flags:
            return tensors.read_flags(cells)[is_second]
        rows = [*tensors.fields, *tensors.action, tensors.reward, *tensors.extras]
        field: Any = rows[column]
        read: torch.Tensor = field.read(cells)
        return read

    def are_valid(self, ids: Ids) -> Flags:
        """Return which ids, of any shape, are transitions. Entries added with `valid=False` are not."""
        if self.all_valid:
            return np.ones(np.shape(ids), np.bool_)
        return ~self._read_any_shape(self.tensors.are_invalid, ids)

    def are_ends(self, ids: Ids) -> Flags:
        """Return which ids, of any shape, are the last of their episodes."""
        return self._read_any_shape(self.tensors.are_ends, ids)

    def rewards(self, ids: Ids) -> Array:
        """Return the rewards of ids of any shape."""
        return self._read_any_shape(self.tensors.reward.read, ids)

    def outcomes(self, ids: Ids) -> tuple[Array, Flags, Flags]:
        """Return rewards, terminated and truncated of ids of any shape."""
        terminated = self._read_any_shape(lambda cells: self.tensors.read_flags(cells)[0], ids)
        truncated = self._read_any_shape(lambda cells: self.tensors.read_flags(cells)[1], ids)
        return self.rewards(ids), terminated, truncated

    def extra(self, number: int, ids: Ids) -> Array:
        """Return rows of extra number `number`, of ids of any shape."""
        return self._read_any_shape(self.tensors.extras[number].read, ids)

    def _read_any_shape(self, read: Callable[[torch.Tensor], torch.Tensor], ids: Ids) -> Array:
        with self._lock:
            self._order_streams()
            wanted = np.asarray(ids, np.int64)
            require_in_range(wanted, self.first_id, self.next_id)
            rows: Array = read(self._to_device(wanted.reshape(-1)) % self.tensors.cells).cpu().numpy()
            return rows.reshape(*wanted.shape, *rows.shape[1:])

    # ---------------------------------------------------------------- checkpoints

    def snapshot(self) -> Any:
        """Return all transitions as segments on the host, for checkpoints and pickles. Waits for the device.

        The store keeps the segments, compressed, so that the next snapshot copies only newer transitions.
        """
        with self._lock:
            self._order_streams()
            if self._host is None or self._host.next_tick < self.first_tick:
                self._host = self._new_host_store(self.first_tick)
            host = self._host
            for step in self._read_chunks(host.next_tick):
                host.extend(*step)
            host.evict(self.first_tick)
            return host.snapshot()

    def restore(self, state: Any) -> None:
        """Load the transitions of a snapshot, also one of a store on the host. Only for a store without ticks."""
        host = self._new_host_store(state.first_tick)
        host.restore(state)
        self._change_alone(lambda: self._copy_host(host))

    def _copy_host(self, host: Store) -> None:
        """Write all ticks of a store on the host, and keep it for the next snapshot."""
        self._start_tick = max(host.first_tick, host.next_tick - self._capacity_ticks)
        ticks = self._count_chunk_ticks()
        for tick in range(self._start_tick, host.next_tick, ticks):
            self._write(self._check.send(self._read_host(host, tick, min(tick + ticks, host.next_tick))))
        self._host = host

    def _read_host(self, host: Store, first_tick: int, stop_tick: int) -> Step:
        """Return ticks of a store on the host as arrays of (ticks, lanes, ...)."""
        ids = np.arange(first_tick * self.lanes, stop_tick * self.lanes)
        leading = (stop_tick - first_tick, self.lanes)
        view = host.view()
        arrays = view.read(ids, self.columns.batch_outputs)
        rows = DrawnRows.split(self.columns, arrays).reshape(leading)
        valid = None if view.all_valid else view.are_valid(ids).reshape(leading)
        return Step(**rows._asdict(), valid=valid)

    def _new_host_store(self, first_tick: int) -> Store:
        """Return an empty store on the host, for snapshots."""
        budget = Budget.from_settings(None, self.schema, can_spill=False, tuning=self._tuning)
        return Store(self.schema, self._capacity_ticks, budget, tuning=self._tuning, first_tick=first_tick)

    def _count_chunk_ticks(self) -> int:
        """Return how many ticks are copied between host and device at once."""
        tick_bytes = self.lanes * max(1, sum(2 * leaf.nbytes for leaf in self.schema.leaves))
        return max(1, _CHUNK_BYTES // tick_bytes)

    def _read_chunks(self, first_tick: int) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of `Store.extend` for the ticks from `first_tick` on."""
        if self._ring is None:
            return
        ticks = self._count_chunk_ticks()
        schema = self.schema
        for tick in range(first_tick, self.next_tick, ticks):
            tensors = self._read_ticks(self._ring.tensors, tick, min(tick + ticks, self.next_tick))
            step = map_arrays(tensors, lambda tensor: tensor.cpu().numpy())
            yield (
                schema.observation.build(step.obs),
                schema.action.build(step.action),
                step.reward,
                schema.observation.build(step.next_obs),
                step.terminated,
                step.truncated,
                schema.extras.build(step.extras),
                step.valid,
            )

    def _read_ticks(self, tensors: Tensors, first_tick: int, stop_tick: int) -> TensorStep:
        """Return held ticks as a step, to be written to another ring or to the host."""
        from holdall.device.tensors import TensorStep  # noqa: PLC0415

        ids = self._torch.arange(first_tick * self.lanes, stop_tick * self.lanes, device=self.device)
        leading = (stop_tick - first_tick, self.lanes)
        rows = tensors.read(ids).reshape(leading)
        valid = None
        if tensors.has_masks:
            valid = tensors.are_invalid(ids % tensors.cells).view(leading).logical_not()
        return TensorStep(**rows._asdict(), valid=valid)

    # ---------------------------------------------------------------- accounting

    def report(self) -> list[FieldReport]:
        """Return the bytes of every field on the device, and how it is stored."""
        if self._ring is None:
            return []
        tensors = self._ring.tensors
        held = self.next_id - self.first_id
        fields = []
        for field, (slice_bytes, log_bytes) in zip(tensors.fields, tensors.observation_bytes, strict=True):
            name = field_name("obs", field.leaf.name)
            finding = f"{field.window.describe()}, each slice once, on {self.device}"
            fields.append(FieldReport(name, slice_bytes, log_bytes, 0, 2 * held * field.leaf.nbytes, finding))
        named = [("action", field) for field in tensors.action] + [("extras", field) for field in tensors.extras]
        for prefix, row in [*named, ("reward", tensors.reward)]:
            name = field_name(prefix, row.leaf.name)
            finding = f"rows on {self.device}"
            fields.append(FieldReport(name, 0, 0, row.nbytes, held * row.leaf.nbytes, finding))
        flag_bytes = tensors.ends.nbytes + (0 if tensors.invalid is None else tensors.invalid.nbytes)
        fields.append(FieldReport("flags", 0, 0, flag_bytes, 2 * held, f"rows on {self.device}"))
        return fields

    @property
    def staging_bytes(self) -> int:
        """Bytes of pinned memory on the host."""
        return self._check.pinned_bytes

    segments = 0
    """Segments on the host: none."""
    backlog = 0
    """Blocks that wait to be compressed: none."""
    failure = ""
    """What went wrong in the background: nothing runs there."""
    disk_bytes = 0
    """Bytes on disk: none."""
    dropped_early = 0
    """Transitions that were evicted before the capacity was reached: none."""
    drop_reason = ""
    """Why transitions were evicted early. Empty, because none are."""
    block_source = None
    """The object that chooses codecs for a save. None, because snapshots are compressed already."""
    capacity_that_fits: int | None = None
    """None, because the constructor refuses a capacity that does not fit."""

    def set_pressure_check(self, check: PressureCheck | None) -> None:
        """Do nothing: the transitions take no memory of the host."""

    def relieve(self, nbytes: int) -> None:
        """Do nothing: the transitions take no memory of the host."""

    def wait_idle(self) -> None:
        """Wait until the device has written everything."""
        if self.device.type == "cuda":
            self._torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Free everything. Batches that were returned stay valid."""
        with self._lock:
            self._order_streams()
            self._ring = None
            self._sampler = None
            if self._host is not None:
                self._host.close()
                self._host = None

    # ---------------------------------------------------------------- turns

    def _order_streams(self) -> bool:
        """Make the current stream wait for operations on the stream that was used last. Called with the lock.

        Return whether a CUDA graph is being captured on the current stream.
        """
        if not self._has_streams:
            return False
        cuda = self._torch.cuda
        if cuda.is_current_stream_capturing():
            return True
        stream = cuda.current_stream(self.device.index)
        before = self._stream
        # `stream != None` is False in torch, so None is checked separately.
        if before is None or stream != before:
            if before is not None:
                stream.wait_stream(before)
            if self._sampler is not None:
                self._sampler[1].forget_weights()
            self._stream = stream
        return False

    def _change_alone(self, change: Callable[[], None]) -> None:
        """Change the store. Raise HoldallError if a signal handler interrupts another change to do so."""
        with self._lock:
            if self._change is not None and self._change() is not None:
                raise HoldallError(
                    "The memory was called from inside one of its own calls. Signal handlers must not use it while it "
                    "adds transitions."
                )
            self._order_streams()
            # The mark is freed when this call ends, even if an interrupt skips the last line.
            mark = _Mark()
            self._change = weakref.ref(mark)
            try:
                change()
            finally:
                self._change = None

    def _to_device(self, array: Any) -> torch.Tensor:
        """Return a copy of a small array on the device."""
        return self._check.send_array(array)


class _Mark:
    """Object for a weak reference, see `DeviceStore._change_alone`."""

    __slots__ = ("__weakref__",)


def _find_last(ids: Ids) -> tuple[Ids, NDArray[np.intp]]:
    """Return every id once, and the position of its last occurrence."""
    unique, positions = np.unique(ids[::-1], return_index=True)
    return unique, len(ids) - 1 - positions
