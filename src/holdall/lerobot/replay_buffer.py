"""ReplayBuffer: LeRobot's replay buffer over a ReplayMemory.

    add    -> TransitionLayout.make_step -> Store.append        images become 8-bit words if these are exact
    sample -> slots from torch -> View.read -> decode -> augmentation of LeRobot

Guarantee: `state` and `next_state` of a row have, bit for bit, the float32 values that were passed to `add`, also at
time limits, at the ends of interventions and next to rows that were skipped. With one seed, torch draws the same rows
as in LeRobot's buffer.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from holdall.checkpoint import SaveHandle
from holdall.checks import refuse_malformed, require_count, require_flag, to_whole
from holdall.delivery import Loader
from holdall.errors import ArgumentError, CheckpointError, ClosedError, MissingPackageError
from holdall.lerobot import datasets
from holdall.lerobot.drawn_batches import (
    BatchTransition,
    DrawnBatch,
    DrawnQueue,
    SavedQueue,
    pack_queues,
    unpack_queues,
)
from holdall.lerobot.images import ImageForm, decode
from holdall.lerobot.layout import StoredRows, TransitionLayout
from holdall.lerobot.slot_tensor import SlotTensor
from holdall.memory import ReplayMemory
from holdall.report import MemoryReport
from holdall.store.tuning import Tuning
from holdall.store.view import View

_LAYOUT_FILE = "lerobot/layout.json"
_GENERATOR_FILE = "lerobot/generator"
_DRAWN_FILE = "lerobot/drawn.npz"
_FORMAT = 1
_DATASET_ROWS = 64
"""Number of transitions that are read at once while a dataset is written."""

Ids = NDArray[np.int64]


class ReplayBuffer:
    """Drop-in for LeRobot's `lerobot.rl.buffer.ReplayBuffer`. All methods may be called from any thread.

    Everything is float32, as in LeRobot. Images, which are the keys that start with `observation.image`, are stored as
    8-bit words where these give exactly the same values, and as float32 elsewhere.

    Args:
        capacity: Maximum number of transitions.
        device: Device of the batches.
        state_keys: Keys of the states. `from_lerobot_dataset` needs them.
        image_augmentation_function: Takes and returns a batch of images. None: LeRobot's own random shift.
        use_drq: Augment the images of every batch.
        storage_device: "cpu": transitions are stored in RAM.
        optimize_memory: Changes which rows are drawn, as in LeRobot: a buffer that is not full never draws the newest
            row. It changes nothing else: states are always stored once, and next states are always exact.
        budget: See `holdall.ReplayMemory`.
        prefer: See `holdall.ReplayMemory`.
        spill_dir: See `holdall.ReplayMemory`. Without it, a budget in bytes that does not hold `capacity` keeps the
            newest transitions that fit.
        lossy_8bit_images: Round images to the nearest `k / 255`. This changes images that were resized.

    Examples:
        >>> from holdall.lerobot import ReplayBuffer
        >>> buffer = ReplayBuffer(capacity=1_000, device="cpu", state_keys=["observation.state"], use_drq=False)
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device | str = "cuda:0",
        state_keys: Sequence[str] | None = None,
        image_augmentation_function: Callable[[torch.Tensor], torch.Tensor] | None = None,
        use_drq: bool = True,
        storage_device: torch.device | str = "cpu",
        optimize_memory: bool = False,
        *,
        budget: str | int | None = "auto",
        prefer: str = "balanced",
        spill_dir: str | os.PathLike[str] | None = None,
        lossy_8bit_images: bool = False,
        _tuning: Tuning | None = None,
    ) -> None:
        whole_capacity: Any = to_whole(capacity)
        if isinstance(whole_capacity, int) and whole_capacity <= 0:
            raise ArgumentError(f"Capacity must be greater than 0. It is {whole_capacity}.")
        self.capacity = require_count("capacity", whole_capacity, 1)
        self.device = _find_device(device)
        self.storage_device = _require_host(storage_device)
        self.state_keys = [] if state_keys is None else list(state_keys)
        self.image_augmentation_function = image_augmentation_function
        self.use_drq = require_flag("use_drq", use_drq)
        self.optimize_memory = require_flag("optimize_memory", optimize_memory)
        self.lossy_8bit_images = require_flag("lossy_8bit_images", lossy_8bit_images)
        self._tiers: dict[str, Any] = {
            "budget": budget,
            "prefer": prefer,
            "spill_dir": spill_dir,
            "_tuning": _tuning,
        }
        self._layout: TransitionLayout | None = None
        self._memory: ReplayMemory | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # Guards the layout and calls of `add`. Acquired before `_draw_lock`.
        self._draw_lock = threading.Lock()  # Guards draws, and the queues of iterators.
        # The loader and the queue of each iterator. Weak references: an iterator that was deleted is not saved.
        self._iterators: list[tuple[weakref.ref[Any], weakref.ref[DrawnQueue]]] = []
        self._restored: list[SavedQueue] = []  # Queues of saved iterators that no iterator has continued yet.

    # ---------------------------------------------------------------- size and fields

    @property
    def memory(self) -> ReplayMemory:
        """The memory that holds the transitions. The first `add` makes it."""
        if self._memory is None:
            raise ArgumentError("The buffer is empty, so it has no memory yet. Add a transition first.")
        return self._memory

    @property
    def initialized(self) -> bool:
        """Whether a transition was added."""
        return self._memory is not None

    def __len__(self) -> int:
        return 0 if self._memory is None else self._memory.next_id - self._memory.first_id

    @property
    def size(self) -> int:
        """Number of transitions that are held."""
        return len(self)

    @property
    def position(self) -> int:
        """Slot of the next transition."""
        return 0 if self._memory is None else self._memory.next_id % self.capacity

    @property
    def states(self) -> dict[str, SlotTensor]:
        """States by key and slot. Each tensor is read when it is indexed."""
        return {
            key: self._make_column(lambda ids, key=key: self._read_now(ids)["state"][key])
            for key in self._known_layout.states
        }

    @property
    def next_states(self) -> dict[str, SlotTensor]:
        """Next states by key and slot."""
        return {
            key: self._make_column(lambda ids, key=key: self._read_now(ids)["next_state"][key])
            for key in self._known_layout.states
        }

    @property
    def actions(self) -> SlotTensor:
        """Actions by slot."""
        return self._make_column(lambda ids: self._send(self._read_without_images(ids).action))

    @property
    def rewards(self) -> SlotTensor:
        """Rewards by slot."""
        return self._make_column(lambda ids: self._send(self._read_without_images(ids).reward))

    @property
    def dones(self) -> SlotTensor:
        """Whether the episode ended at the transition of a slot, as bool."""
        return self._make_column(lambda ids: self._send(self._read_without_images(ids).terminated))

    @property
    def truncateds(self) -> SlotTensor:
        """Whether a time limit ended the episode at the transition of a slot, as bool."""
        return self._make_column(lambda ids: self._send(self._read_without_images(ids).truncated))

    @property
    def has_complementary_info(self) -> bool:
        """Whether the first transition had complementary info."""
        return bool(self.complementary_info_keys)

    @property
    def complementary_info_keys(self) -> list[str]:
        """Keys of the complementary info that is stored: those of the first transition."""
        return [] if self._layout is None else list(self._layout.complementary)

    @property
    def complementary_info(self) -> dict[str, SlotTensor]:
        """Complementary info by key and slot."""
        return {
            key: self._make_column(lambda ids, key=key: self._send(self._read_without_images(ids).complementary[key]))
            for key in self.complementary_info_keys
        }

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field."""
        return self.memory.report()

    # ---------------------------------------------------------------- adding

    def add(
        self,
        state: Mapping[str, Any],
        action: Any,
        reward: Any,
        next_state: Mapping[str, Any] | None,
        done: Any,
        truncated: Any,
        complementary_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one transition. Tensors may have a leading axis of 1, and are converted to float32.

        The first transition decides which keys are stored. Later transitions may have further keys, which are ignored.

        Args:
            next_state: The state after the action. At a time limit, this is the final state of the episode. It may be
                None if `done` is True.
            complementary_info: Tensors and numbers by name.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("The buffer was closed. Make a new one.")
            is_done = bool(done)
            if next_state is None:
                if not is_done:
                    raise ArgumentError(
                        "next_state is None, but done is False, so training needs the next state. Pass the state after "
                        "the action, also with optimize_memory=True."
                    )
                next_state = state
            layout = self._layout
            if layout is None:
                layout = TransitionLayout.of(state, action, complementary_info, is_lossy=self.lossy_8bit_images)
            step = layout.make_step(state, action, reward, next_state, is_done, bool(truncated), complementary_info)
            if self._memory is None:
                memory = self._new_memory(layout)
                memory.store.append(*step)
                self._layout = layout
                self._memory = memory
            else:
                self._memory.store.append(*step)

    def _new_memory(self, layout: TransitionLayout) -> ReplayMemory:
        memory = ReplayMemory(layout.schema, None, self.capacity, **self._tiers)
        memory.host_store.set_reward_dtype(np.dtype(np.float32))
        return memory

    # ---------------------------------------------------------------- sampling

    def sample(self, batch_size: int) -> BatchTransition:
        """Draw `batch_size` transitions with torch's generator. Draw fewer if the buffer has fewer transitions.

        Raises:
            ClosedError: The buffer is empty or closed. It is a RuntimeError.
        """
        return self._augment(self._draw(batch_size).read())

    def get_iterator(
        self, batch_size: int, async_prefetch: bool = True, queue_size: int = 2
    ) -> Iterator[BatchTransition]:
        """Return an endless iterator over batches.

        Every `next` draws a batch with torch's generator, and returns the batch that was drawn `queue_size` calls
        before. So one seed gives one sequence of batches. An error in the background is raised by `next`. In a loaded
        buffer, an iterator continues a saved iterator of the same batch size: it first returns the batches that the
        saved iterator had drawn and not returned.

        Args:
            async_prefetch: Read batches ahead in a thread. False reads them when they are requested.
            queue_size: Number of batches that are read ahead.
        """
        ahead = require_count("queue_size", queue_size, 1) if async_prefetch else 0
        with self._draw_lock:
            queue = DrawnQueue(batch_size, self._draw, self._augment, self._draw_lock, self._take_restored(batch_size))
            receive: Any = queue.receive  # The batches of other loaders have another type.
            loader: Any = Loader(queue.draw, receive, ahead)
            self._iterators = [references for references in self._iterators if references[0]() is not None]
            self._iterators.append((weakref.ref(loader), weakref.ref(queue)))
        return iter(loader)

    def _take_restored(self, batch_size: int) -> list[DrawnBatch]:
        """Remove and return the batches of the first saved iterator of this batch size. Called with the draw lock."""
        for number, queue in enumerate(self._restored):
            if queue.batch_size == batch_size:
                return self._restored.pop(number).batches
        return []

    def _list_queues(self) -> list[SavedQueue]:
        """Return the undelivered batches of all iterators that are in use. Called with the draw lock."""
        queues: list[SavedQueue] = []
        for loader_reference, queue_reference in self._iterators:
            loader = loader_reference()
            queue = queue_reference()
            if loader is not None and queue is not None and not loader.is_closed:
                queues.append(SavedQueue(queue.batch_size, list(queue.undelivered)))
        return [*queues, *self._restored]

    def _draw(self, batch_size: int) -> DrawnBatch:
        """Draw a batch. Its rows are read later, but they are those of this moment."""
        batch_size = require_count("batch_size", batch_size, 0)
        if self._is_closed:
            raise ClosedError("The buffer was closed. Make a new one.")
        if self._memory is None:
            raise ClosedError("Cannot sample from an empty buffer. Add transitions first.")
        view = self._memory.host_store.view()
        ids = self._draw_ids(view, min(batch_size, view.next_id - view.first_id))
        return DrawnBatch(ids, lambda rows: self._read(view, ids[rows]))

    def _draw_ids(self, view: View, count: int) -> Ids:
        """Draw slots as LeRobot does, and return the ids of their transitions."""
        filled = min(view.next_id, self.capacity)
        high = filled
        if self.optimize_memory and filled < self.capacity:
            high = max(1, filled - 1)
        slots = torch.randint(low=0, high=high, size=(count,)).numpy()
        ids = self._find_ids(view.next_id, slots)
        if view.first_id > view.next_id - filled:  # A budget without a disk tier has evicted transitions.
            redrawn = torch.randint(low=view.first_id, high=view.next_id, size=(count,)).numpy()
            ids = np.where(ids < view.first_id, redrawn, ids)
        return ids

    def _find_ids(self, next_id: int, slots: Ids) -> Ids:
        """Return the ids of the transitions in slots."""
        newest = next_id - 1
        ids: Ids = newest - (newest - slots) % self.capacity
        return ids

    def _augment(self, batch: BatchTransition) -> BatchTransition:
        """If `use_drq`, augment the images of a batch in place: all images of one shape at once, as LeRobot does."""
        if self.use_drq and len(batch["reward"]):
            for keys in self._known_layout.group_images():
                augment = self._find_augmentation()
                images = torch.cat([batch[part][key] for key in keys for part in ("state", "next_state")])
                augmented = augment(images)
                pairs = augmented.reshape(len(keys), 2, -1, *augmented.shape[1:])
                for key, (before, after) in zip(keys, pairs, strict=True):
                    batch["state"][key] = before
                    batch["next_state"][key] = after
        return batch

    def _find_augmentation(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the image augmentation. LeRobot's own is compiled when it is first needed."""
        if self.image_augmentation_function is None:
            try:
                from lerobot.rl.buffer import random_shift  # noqa: PLC0415  an optional package
            except ImportError as error:
                raise MissingPackageError(
                    f"The default image augmentation is LeRobot's, which cannot be imported ({error}). Run "
                    '"pip install lerobot", pass image_augmentation_function, or use_drq=False.'
                ) from error
            self.image_augmentation_function = torch.compile(random_shift)
        return self.image_augmentation_function

    # ---------------------------------------------------------------- reading

    def _read(self, view: View, ids: Ids) -> BatchTransition:
        """Return transitions on the buffer's device, before the augmentation."""
        layout = self._known_layout
        rows = layout.read_rows(view, ids)
        state = {key: self._send(array) for key, array in rows.states.items()}
        next_state = {key: self._send(array) for key, array in rows.next_states.items()}
        for key in layout.images:
            state[key], next_state[key] = self._read_images(view, ids, key, rows.forms[key])
        info = {key: self._send(array) for key, array in rows.complementary.items()}
        return BatchTransition(
            state={key: state[key] for key in layout.states},
            action=self._send(rows.action),
            reward=self._send(rows.reward),
            next_state={key: next_state[key] for key in layout.states},
            done=self._send(rows.terminated).float(),
            truncated=self._send(rows.truncated).float(),
            complementary_info=info or None,
        )

    def _read_images(
        self, view: View, ids: Ids, key: str, forms: NDArray[np.uint8]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images of one key in states and in next states. `forms` has their `ImageForm`, (2, rows)."""
        layout = self._known_layout
        is_floats = forms == ImageForm.FLOATS
        if is_floats.all() and len(ids):
            floats, next_floats = view.read(ids, layout.find_image_outputs(key, "floats"))
            return self._send(floats), self._send(next_floats)
        shape = (len(ids), *layout.states[key])
        images = (torch.empty(shape, device=self.device), torch.empty(shape, device=self.device))
        for kind, is_wanted in (("words", ~is_floats), ("floats", is_floats)):
            rows = is_wanted.any(axis=0).nonzero()[0]
            if not len(rows):
                continue
            arrays = view.read(ids[rows], layout.find_image_outputs(key, kind))
            for side, array in enumerate(arrays):
                stored = self._send(array)
                if is_wanted[side].all():
                    decode(stored, forms[side], images[side])
                    continue
                kept = is_wanted[side, rows].nonzero()[0]
                some = torch.empty((len(kept), *shape[1:]), device=self.device)
                decode(stored[self._send(kept)], forms[side, rows[kept]], some)
                images[side][self._send(rows[kept])] = some
        return images

    def _send(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    @property
    def _known_layout(self) -> TransitionLayout:
        if self._layout is None:
            raise ArgumentError("The buffer is empty, so its fields are not known yet. Add a transition first.")
        return self._layout

    def _read_now(self, ids: Ids) -> BatchTransition:
        return self._read(self.memory.host_store.view(), ids)

    def _read_without_images(self, ids: Ids) -> StoredRows:
        return self._known_layout.read_rows(self.memory.host_store.view(), ids)

    def _make_column(self, read: Callable[..., torch.Tensor]) -> SlotTensor:
        memory = self.memory

        def read_slots(slots: Ids) -> torch.Tensor:
            return read(self._find_ids(memory.next_id, slots))

        return SlotTensor(min(memory.next_id, self.capacity), read_slots)

    # ---------------------------------------------------------------- datasets

    @classmethod
    def from_lerobot_dataset(
        cls,
        lerobot_dataset: Any,
        device: torch.device | str = "cuda:0",
        state_keys: Sequence[str] | None = None,
        capacity: int | None = None,
        image_augmentation_function: Callable[[torch.Tensor], torch.Tensor] | None = None,
        use_drq: bool = True,
        storage_device: torch.device | str = "cpu",
        optimize_memory: bool = False,
        *,
        drop_unfinished: bool = False,
        **settings: Any,
    ) -> Self:
        """Return a buffer with the transitions of a LeRobotDataset. Every frame is decoded once.

        Args:
            state_keys: Keys of the dataset that form a state.
            capacity: Maximum number of transitions; the length of the dataset by default.
            drop_unfinished: Leave out the last frame of an episode that is not done. A dataset does not contain the
                state after this frame. By default, its own state is used as its next state, as in LeRobot.
            settings: Further keywords of the constructor, such as `budget`.
        """
        frames = len(lerobot_dataset)
        if capacity is None:
            capacity = frames
        if capacity < frames:
            raise ArgumentError(
                "The capacity of the ReplayBuffer must be greater than or equal to the length of the LeRobotDataset. "
                f"It is {capacity}, and the dataset has {frames} frames."
            )
        if state_keys is None:
            raise ArgumentError(
                "State keys must be provided when converting LeRobotDataset to Transitions. Pass state_keys=[...] with "
                "keys of the dataset."
            )
        buffer = cls(
            capacity,
            device,
            state_keys,
            image_augmentation_function,
            use_drq,
            storage_device,
            optimize_memory,
            **settings,
        )
        for transition in datasets.read_transitions(lerobot_dataset, list(state_keys), drop_unfinished):
            buffer.add(**transition)
        return buffer

    def to_lerobot_dataset(
        self,
        repo_id: str,
        fps: int = 1,
        root: str | os.PathLike[str] | None = None,
        task_name: str = "from_replay_buffer",
        *,
        split_segments: bool = False,
    ) -> Any:
        """Write all transitions to a new LeRobotDataset. Its images have 8 bits, so this is not a checkpoint.

        Args:
            split_segments: Also end an episode of the dataset at a row whose next state is not the state of the next
                row, such as at the end of an intervention. Otherwise such rows get a wrong next state when the dataset
                is read.
        """
        if not len(self):
            raise ArgumentError("The replay buffer is empty. Cannot convert to a dataset. Add transitions first.")
        view = self.memory.host_store.view()
        count = view.next_id - view.first_id
        layout = self._known_layout
        first = self._read(view, np.array([view.first_id]))
        features = datasets.describe_features(first["state"], first["action"], first["complementary_info"] or {})
        with datasets.DatasetFile(repo_id, fps, root, features) as file:
            for start in range(0, count, _DATASET_ROWS):
                # One more row is read, to see whether it continues the last row.
                ids = view.first_id + np.arange(start, min(start + _DATASET_ROWS + 1, count))
                rows = self._read(view, ids)
                for row in range(min(_DATASET_ROWS, len(ids))):
                    info = {key: values[row] for key, values in (rows["complementary_info"] or {}).items()}
                    state = {key: rows["state"][key][row] for key in layout.states}
                    file.add_frame(state, rows["action"][row], rows["reward"][row], rows["done"][row], info, task_name)
                    is_end = bool(rows["done"][row]) or bool(rows["truncated"][row])
                    if split_segments and not is_end and row + 1 < len(ids):
                        is_end = not all(
                            torch.equal(rows["next_state"][key][row], rows["state"][key][row + 1])
                            for key in layout.states
                        )
                    if is_end:
                        file.end_episode()
        return file.dataset

    # ---------------------------------------------------------------- checkpoints

    def save(self, url: str | os.PathLike[str], *, keep: int = 3, mirror: str | None = None) -> SaveHandle:
        """Write a checkpoint of this moment in the background. Only new data is written, see `ReplayMemory.save`.

        The checkpoint contains the state of torch's generator, and the batches that iterators have drawn and not
        returned yet. So a loaded buffer continues with the same batches. Iterators that were closed or deleted are not
        saved.
        """
        return self._save(url, {}, keep, mirror)

    def _save(
        self, url: str | os.PathLike[str], attach: Mapping[str, bytes], keep: int, mirror: str | None
    ) -> SaveHandle:
        """Save the buffer with the files `attach`. Both locks are held while the state is recorded."""
        with self._lock, self._draw_lock:
            memory = self.memory
            description = {
                "format": _FORMAT,
                "layout": self._known_layout.describe(),
                "capacity": self.capacity,
                "state_keys": self.state_keys,
                "use_drq": self.use_drq,
                "optimize_memory": self.optimize_memory,
                "lossy_8bit_images": self.lossy_8bit_images,
            }
            files = {
                **attach,
                _LAYOUT_FILE: json.dumps(description).encode(),
                _GENERATOR_FILE: torch.get_rng_state().numpy().tobytes(),
                _DRAWN_FILE: pack_queues(self._list_queues(), memory.first_id),
            }
            if self.device.type == "cuda":
                files[f"{_GENERATOR_FILE}-cuda"] = torch.cuda.get_rng_state(self.device).numpy().tobytes()
            return memory.save(url, attach=files, keep=keep, mirror=mirror)

    @classmethod
    def load(
        cls,
        url: str | os.PathLike[str],
        device: torch.device | str = "cuda:0",
        capacity: int | None = None,
        image_augmentation_function: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        budget: str | int | None = "auto",
        prefer: str = "balanced",
        spill_dir: str | os.PathLike[str] | None = None,
        restore_generator: bool = True,
        _tuning: Tuning | None = None,
    ) -> Self:
        """Load the newest complete checkpoint of `save`.

        Args:
            capacity: Maximum number of transitions. By default, the saved capacity. The newest transitions are kept.
            restore_generator: Set torch's generator to its saved state, and continue the saved iterators. The next
                batches are then those that the saved buffer would have returned, unless their rows do not fit into
                `capacity` or `budget`.
        """
        tiers: dict[str, Any] = {"budget": budget, "prefer": prefer, "spill_dir": spill_dir, "_tuning": _tuning}
        memory = ReplayMemory.load(url, capacity, **tiers)
        try:
            with refuse_malformed(f"The buffer that was saved in '{os.fspath(url)}'"):
                saved = _read_description(memory, url)
                layout = TransitionLayout.from_description(saved["layout"], is_lossy=saved["lossy_8bit_images"])
                _require_fields(memory, layout, url)
                buffer = cls(
                    saved["capacity"] if capacity is None else capacity,
                    device,
                    saved["state_keys"],
                    image_augmentation_function,
                    saved["use_drq"],
                    optimize_memory=saved["optimize_memory"],
                    lossy_8bit_images=saved["lossy_8bit_images"],
                    **tiers,
                )
            buffer._layout = layout
            buffer._memory = memory
            if restore_generator:
                buffer._restore_draws()
        except BaseException:
            memory.close()
            raise
        return buffer

    def _restore_draws(self) -> None:
        """Continue the saved iterators and torch's generators."""
        attached = self.memory.attached
        view = self.memory.host_store.view()
        self._restored = unpack_queues(
            attached[_DRAWN_FILE], partial(self._read, view), range(view.first_id, view.next_id), self.device
        )
        torch.set_rng_state(_to_byte_tensor(attached[_GENERATOR_FILE]))
        name = f"{_GENERATOR_FILE}-cuda"
        if self.device.type == "cuda" and name in attached:
            torch.cuda.set_rng_state(_to_byte_tensor(attached[name]), self.device)

    def close(self) -> None:
        """Wait for saves, and free everything. Batches that were returned stay valid."""
        with self._lock:
            self._is_closed = True
            if self._memory is not None:
                self._memory.close()


def _read_description(memory: ReplayMemory, url: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings of the buffer that was saved with a memory. Raise CheckpointError if there are none."""
    if _LAYOUT_FILE not in memory.attached:
        raise CheckpointError(
            f"The checkpoint in '{os.fspath(url)}' is not one of a LeRobot buffer: it has no '{_LAYOUT_FILE}'. Use "
            "holdall.ReplayMemory.load."
        )
    saved: dict[str, Any] = json.loads(memory.attached[_LAYOUT_FILE])
    if saved.get("format") != _FORMAT:
        raise CheckpointError(
            f"The checkpoint in '{os.fspath(url)}' has format {saved.get('format')}, but this version reads {_FORMAT}. "
            "Update holdall."
        )
    return saved


def _require_fields(memory: ReplayMemory, layout: TransitionLayout, url: str | os.PathLike[str]) -> None:
    """Raise CheckpointError if a memory does not have the fields of a layout."""
    if layout.schema != memory.schema:
        raise CheckpointError(
            f"The checkpoint in '{os.fspath(url)}' has other fields than its '{_LAYOUT_FILE}' describes. Load another "
            "checkpoint."
        )


def _to_byte_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _find_device(device: torch.device | str) -> torch.device:
    try:
        torch_device = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"device ({device}) is not a device of torch ({error}). Use 'cpu' or 'cuda'.") from error
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"device ({device}): torch finds no CUDA device here. Pass device='cpu'.")
    return torch_device


def _require_host(storage_device: torch.device | str) -> torch.device:
    torch_device = torch.device(storage_device)
    if torch_device.type != "cpu":
        raise ArgumentError(
            f"storage_device ({storage_device}) must be the CPU: transitions are stored in RAM, and images are sent to "
            "`device` as 8-bit words. Pass storage_device='cpu'."
        )
    return torch_device
