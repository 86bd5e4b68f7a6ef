"""The replay buffers that are compared: an adapter for each library, and the setups in which it is measured.

A library is imported when one of its buffers is made, because any library may be missing. A setup that cannot be
measured on this machine reports the reason, so that no setup is silently skipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.memory import ReplayMemory
from holdall.tools.bench import find_version
from holdall.tools.bench.trace import TraceStep

_FLAGS = ("terminated", "truncated")
_OUTCOMES = ("reward", *_FLAGS)
_TIANSHOU_NAMES = {"obs": "obs", "action": "act", "reward": "rew", "next_obs": "obs_next"}
_TIANSHOU_NAMES |= {name: name for name in _FLAGS}
_SB3 = "stable-baselines3"
_EXTRA = "sb3-extra-buffers"
_TIANSHOU = "tianshou"
LIBRARIES = ("sb3", "sb3-extra-buffers", "cpprb", "torchrl", "tianshou", "holdall")
"""Names of libraries on the command line. Each selects all setups of its library."""


class BufferAdapter(ABC):
    """One buffer of one environment, from any library."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    @abstractmethod
    def prepare(self, step: TraceStep) -> Any:
        """Return a step in the form that `add` takes. This is not timed."""

    def add(self, prepared: Any) -> None:
        """Add one transition."""
        self.buffer.add(prepared)

    def sample(self, batch_size: int) -> Any:
        """Draw a batch, as torch tensors."""
        return self.buffer.sample(batch_size)

    @abstractmethod
    def read_rows(self, ids: Any) -> dict[str, Any]:
        """Return obs, action, reward, next_obs, terminated, truncated of transitions. The first transition has id 0.

        A buffer that does not distinguish terminated from truncated returns `done` in place of both.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the content into an empty folder."""

    @abstractmethod
    def load(self, folder: Path) -> BufferAdapter:
        """Return a buffer with the saved content of `folder`."""

    def wait(self) -> None:  # noqa: B027  Most libraries have no background work.
        """Wait for background work."""

    def close(self) -> None:
        """Free the content, but keep the settings that `load` needs."""
        vars(self).pop("buffer", None)


def open_sb3(
    observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int, *, optimize_memory_usage: bool = False
) -> Sb3Adapter:
    """Make a buffer of Stable-Baselines3. With `optimize_memory_usage`, it cannot record time limits."""
    from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer  # noqa: PLC0415 may be missing

    cls: Any = DictReplayBuffer if isinstance(observation, spaces.Dict) else ReplayBuffer
    settings: dict[str, Any] = {}
    if optimize_memory_usage:
        settings = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    return Sb3Adapter(cls(capacity, observation, action, "cpu", n_envs=1, **settings))


def open_sb3_extra(
    observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int, *, method: str
) -> Sb3Adapter:
    """Make a buffer of sb3-extra-buffers, which compresses every observation.

    The element type is that of the space. For a Dict, the library's default is used for all keys: bytes.
    """
    from sb3_extra_buffers.compressed import compressed_replay  # noqa: PLC0415 may be missing

    settings: dict[str, Any] = {"compression_method": method}
    kind = compressed_replay.CompressedDictReplayBuffer
    if not isinstance(observation, spaces.Dict):
        kind = compressed_replay.CompressedReplayBuffer
        settings["dtypes"] = {"elem_type": np.dtype(observation.dtype).type, "runs_type": np.uint16}
    return Sb3Adapter(kind(capacity, observation, action, "cpu", **settings))


class Sb3Adapter(BufferAdapter):
    """A buffer of Stable-Baselines3, or one with the same interface."""

    def prepare(self, step: TraceStep) -> Any:
        """Return the arguments of `add`. Stable-Baselines3 calls both kinds of ending `done`."""
        infos = [{"TimeLimit.truncated": bool(step.truncated[0])}]
        return step.obs, step.next_obs, step.action, step.reward, step.terminated | step.truncated, infos

    def add(self, prepared: Any) -> None:
        """Add one transition."""
        self.buffer.add(*prepared)

    def read_rows(self, ids: Any) -> dict[str, Any]:
        """Read rows as `sample` does, and the flags from their arrays."""
        batch = self.buffer._get_samples(ids)
        done = self.buffer.dones[ids, 0].astype(np.bool_)
        truncated = self.buffer.timeouts[ids, 0].astype(np.bool_)
        rows = {"obs": batch.observations, "next_obs": batch.next_observations}
        rows |= {"action": batch.actions, "reward": batch.rewards}
        if self.buffer.handle_timeout_termination:
            return rows | {"terminated": done & ~truncated, "truncated": truncated}
        return rows | {"done": done}

    def save(self, folder: Path) -> None:
        """Pickle the buffer, as `model.save_replay_buffer` does."""
        from stable_baselines3.common.save_util import save_to_pkl  # noqa: PLC0415 loaded with the buffer

        save_to_pkl(folder / "buffer.pkl", self.buffer)

    def load(self, folder: Path) -> Sb3Adapter:
        """Read the pickle."""
        from stable_baselines3.common.save_util import load_from_pkl  # noqa: PLC0415 loaded with the buffer

        return Sb3Adapter(load_from_pkl(folder / "buffer.pkl"))


class CpprbAdapter(BufferAdapter):
    """A buffer of cpprb that stores every observation once (`next_of`). The keys of a Dict are separate fields."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int) -> None:
        from cpprb import ReplayBuffer  # noqa: PLC0415 may be missing

        self._arguments = (observation, action, capacity)
        self._is_dict = isinstance(observation, spaces.Dict)
        parts = observation.spaces if isinstance(observation, spaces.Dict) else {"": observation}
        self._observation_names = tuple(f"obs_{key}" for key in parts)
        fields: dict[str, Any] = {
            f"obs_{key}": {"shape": space.shape, "dtype": space.dtype} for key, space in parts.items()
        }
        fields |= {"action": {"shape": action.shape or 1, "dtype": action.dtype}, "reward": {"dtype": np.float32}}
        fields |= {name: {"dtype": np.bool_} for name in _FLAGS}
        super().__init__(ReplayBuffer(capacity, fields, next_of=self._observation_names))

    def prepare(self, step: TraceStep) -> Any:
        """Return the fields by name, and whether the episode ends."""
        fields = {name: getattr(step, name)[0] for name in ("action", *_OUTCOMES)}
        for name in self._observation_names:
            fields[name] = self._get_part(step.obs, name)
            fields[f"next_{name}"] = self._get_part(step.next_obs, name)
        return fields, bool(step.terminated[0] or step.truncated[0])

    def add(self, prepared: Any) -> None:
        """Add one transition."""
        fields, is_end = prepared
        self.buffer.add(**fields)
        if is_end:
            self.buffer.on_episode_end()

    def sample(self, batch_size: int) -> Any:
        """Draw a batch."""
        import torch  # noqa: PLC0415  It is heavy, and is loaded before anything is timed.

        return {name: torch.as_tensor(array) for name, array in self.buffer.sample(batch_size).items()}

    def read_rows(self, ids: Any) -> dict[str, Any]:
        """Read rows as `sample` does."""
        batch = self.buffer._encode_sample(ids)
        rows = {name: batch[name] for name in ("action", *_OUTCOMES)}
        for field_name, prefix in (("obs", ""), ("next_obs", "next_")):
            parts = {name.removeprefix("obs_"): batch[f"{prefix}{name}"] for name in self._observation_names}
            rows[field_name] = parts if self._is_dict else parts[""]
        return rows

    def save(self, folder: Path) -> None:
        """Write whole transitions, which is the safe mode of cpprb."""
        self.buffer.save_transitions(str(folder / "buffer.npz"), safe=True)

    def load(self, folder: Path) -> CpprbAdapter:
        """Read the file into a new buffer."""
        loaded = CpprbAdapter(*self._arguments)
        loaded.buffer.load_transitions(str(folder / "buffer.npz"))
        return loaded

    def _get_part(self, observation: Any, name: str) -> Any:
        return (observation[name.removeprefix("obs_")] if self._is_dict else observation)[0]


class TorchrlAdapter(BufferAdapter):
    """TorchRL's TensorDictReplayBuffer over a LazyTensorStorage, which reads the spaces from the first transition."""

    def __init__(self, _observation: Any, _action: Any, capacity: int) -> None:
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer  # noqa: PLC0415 may be missing

        self._capacity = capacity
        super().__init__(TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=1))

    def prepare(self, step: TraceStep) -> Any:
        """Make the nested record that TorchRL's collectors make."""
        import torch  # noqa: PLC0415 loaded with the buffer
        from tensordict import TensorDict  # noqa: PLC0415 loaded with the buffer

        following = {"obs": _make_tensors(step.next_obs)}
        following |= {name: torch.as_tensor(getattr(step, name)) for name in _OUTCOMES}
        action = torch.as_tensor(step.action[0])
        return TensorDict({"obs": _make_tensors(step.obs), "action": action, "next": following})

    def read_rows(self, ids: Any) -> dict[str, Any]:
        """Read rows from the storage."""
        import torch  # noqa: PLC0415 loaded with the buffer

        batch = self.buffer.storage.get(torch.as_tensor(ids))
        rows = {"obs": _as_dict(batch["obs"]), "next_obs": _as_dict(batch["next", "obs"]), "action": batch["action"]}
        return rows | {name: batch["next", name] for name in _OUTCOMES}

    def save(self, folder: Path) -> None:
        """Write memory maps."""
        self.buffer.dumps(folder)

    def load(self, folder: Path) -> TorchrlAdapter:
        """Read the memory maps into a new buffer."""
        loaded = TorchrlAdapter(None, None, self._capacity)
        loaded.buffer.loads(folder)
        return loaded


def _make_tensors(observation: Any) -> Any:
    import torch  # noqa: PLC0415 loaded with the buffer

    if isinstance(observation, dict):
        return {key: _make_tensors(part) for key, part in observation.items()}
    return torch.as_tensor(np.ascontiguousarray(observation[0]))


def open_tianshou(
    observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int, *, ignore_obs_next: bool = False
) -> TianshouAdapter:
    """Make a buffer of Tianshou.

    With `ignore_obs_next`, the buffer stores observations once, and only the last frame of a stack. A leading axis of
    length 4 is taken for a stack of frames.
    """
    from tianshou.data import ReplayBuffer  # noqa: PLC0415 may be missing

    settings: dict[str, Any] = {"ignore_obs_next": ignore_obs_next}
    shape = observation.shape or ()
    is_stack = isinstance(observation, spaces.Box) and len(shape) == 3 and shape[0] == 4
    if ignore_obs_next and is_stack:
        settings |= {"stack_num": shape[0], "save_only_last_obs": True}
    return TianshouAdapter(ReplayBuffer(capacity, **settings))


class TianshouAdapter(BufferAdapter):
    """A buffer of Tianshou."""

    def prepare(self, step: TraceStep) -> Any:
        """Make the record that Tianshou's collector makes."""
        from tianshou.data import Batch  # noqa: PLC0415 loaded with the buffer

        fields = {theirs: _drop_lane_axis(getattr(step, ours)) for ours, theirs in _TIANSHOU_NAMES.items()}
        return Batch(**fields, info={})

    def sample(self, batch_size: int) -> Any:
        """Draw a batch."""
        batch, _ = self.buffer.sample(batch_size)
        return batch.to_torch_()

    def read_rows(self, ids: Any) -> dict[str, Any]:
        """Read rows as `sample` does."""
        batch = self.buffer[np.asarray(ids)]
        return {ours: _as_dict(getattr(batch, theirs)) for ours, theirs in _TIANSHOU_NAMES.items()}

    def save(self, folder: Path) -> None:
        """Write HDF5."""
        self.buffer.save_hdf5(str(folder / "buffer.h5"))

    def load(self, folder: Path) -> TianshouAdapter:
        """Read the file into a new buffer."""
        from tianshou.data import ReplayBuffer  # noqa: PLC0415 loaded with the buffer

        return TianshouAdapter(ReplayBuffer.load_hdf5(str(folder / "buffer.h5")))


def _drop_lane_axis(rows: Any) -> Any:
    return {key: part[0] for key, part in rows.items()} if isinstance(rows, dict) else rows[0]


def _as_dict(observed: Any) -> Any:
    """Return a Batch of Tianshou or a TensorDict as a dict. Return arrays unchanged."""
    if not hasattr(observed, "keys"):
        return observed
    return {key: observed[key] for key in observed.keys()}  # noqa: SIM118  Iterating yields rows.


def open_holdall(
    observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int, *, budget: str | int | None = "auto"
) -> HoldallAdapter:
    """Make a memory that returns batches of torch tensors."""
    return HoldallAdapter(ReplayMemory(observation, action, capacity, device="cpu", seed=0, budget=budget), budget)


class HoldallAdapter(BufferAdapter):
    """A ReplayMemory."""

    def __init__(self, memory: ReplayMemory, budget: str | int | None) -> None:
        super().__init__(memory)
        self._budget = budget

    def prepare(self, step: TraceStep) -> Any:
        """Pass the arrays as they are."""
        return step

    def add(self, prepared: Any) -> None:
        """Add one transition."""
        self.buffer.add(*prepared)

    def wait(self) -> None:
        """Wait until all compression is done."""
        self.buffer.store.wait_idle()

    def close(self) -> None:
        """Free the blocks at once."""
        self.buffer.close()

    def read_rows(self, ids: Any) -> dict[str, Any]:
        """Gather rows."""
        batch = self.buffer.gather(ids)
        return {name: getattr(batch, name) for name in TraceStep._fields}

    def save(self, folder: Path) -> None:
        """Write a checkpoint and wait for it."""
        self.buffer.save(folder).result()

    def load(self, folder: Path) -> HoldallAdapter:
        """Load the checkpoint."""
        return HoldallAdapter(ReplayMemory.load(folder, device="cpu", budget=self._budget), self._budget)


@dataclass(frozen=True, slots=True)
class BufferSetup:
    """One library, set up in one way."""

    name: str
    distribution: str
    opener: Callable[..., BufferAdapter]
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_box_only: bool = False  # Whether the library takes no Dict observations.
    needs: str = ""  # A further distribution that must be installed.

    @property
    def version(self) -> str | None:
        """The installed version."""
        return find_version(self.distribution)

    def explain_absence(self, space: spaces.Space[Any] | None = None) -> str | None:
        """Return why the setup cannot be measured, or None if it can."""
        for distribution in (self.distribution, self.needs):
            if distribution and find_version(distribution) is None:
                return f"{distribution} is not installed"
        if self.is_box_only and isinstance(space, spaces.Dict):
            return "it takes no Dict observations"
        return None

    def open(self, observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int) -> BufferAdapter:
        """Make the buffer."""
        return self.opener(observation, action, capacity, **self.settings)


BUFFER_SETUPS = {
    setup.name: setup
    for setup in (
        BufferSetup("sb3", _SB3, open_sb3),
        BufferSetup("sb3 optimize_memory_usage", _SB3, open_sb3, {"optimize_memory_usage": True}, is_box_only=True),
        BufferSetup("sb3-extra-buffers zstd", _EXTRA, open_sb3_extra, {"method": "zstd-3"}, needs="zstd"),
        BufferSetup("sb3-extra-buffers lz4", _EXTRA, open_sb3_extra, {"method": "lz4-frame/1"}, needs="lz4"),
        BufferSetup("cpprb next_of", "cpprb", CpprbAdapter),
        BufferSetup("torchrl", "torchrl", TorchrlAdapter),
        BufferSetup("tianshou", _TIANSHOU, open_tianshou, needs="h5py"),
        BufferSetup("tianshou ignore_obs_next", _TIANSHOU, open_tianshou, {"ignore_obs_next": True}, needs="h5py"),
        BufferSetup("holdall", "holdall", open_holdall),
        BufferSetup("holdall compressed", "holdall", open_holdall, {"budget": None}),
    )
}


def find_setups(names: list[str]) -> list[BufferSetup]:
    """Return the setups selected by names of libraries or of single setups."""
    selected: dict[str, BufferSetup] = {}
    for name in names:
        matching = {
            setup.name: setup
            for setup in BUFFER_SETUPS.values()
            if name in {"all", setup.name} or setup.name.startswith(f"{name} ")
        }
        if not matching:
            known = f"all, {', '.join(LIBRARIES)}, or {', '.join(BUFFER_SETUPS)}"
            raise ArgumentError(f"libraries ({name!r}) must be among {known}.")
        selected |= matching
    return list(selected.values())
