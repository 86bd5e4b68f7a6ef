"""HDF5 files of robomimic: `data/demo_0`, `data/demo_1`, each with `obs`, `actions`, `rewards` and `dones`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall.errors import ArgumentError, MissingPackageError
from holdall.schema import Array
from holdall.space_leaves import stored_space
from holdall.tools.imports.recording import STEPS_AT_ONCE, Piece

_DEMO = "demo_"


class RobomimicRecording:
    """The demonstrations of a file, in the order of their numbers. `states` and `model_file` are not read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = _open(path)
        try:
            self._demos = self._list_demos()
            first = self._demos[0]
            keys = sorted(self._get(first, "obs"))
            self.observation_space = spaces.Dict({key: self._read_space(first, f"obs/{key}") for key in keys})
            self.action_space = self._read_space(first, "actions")
            self.extras: dict[str, spaces.Space[Any]] = {}
            self.steps = sum(len(self._get(demo, "actions")) for demo in self._demos)
            self._reward_dtype = self._file[first]["rewards"].dtype if "rewards" in self._file[first] else np.float32
            self.metadata = self._read_metadata()
        except BaseException:
            self._file.close()
            raise

    def pieces(self) -> Iterator[Piece]:
        """Yield all demonstrations."""
        for demo in self._demos:
            steps = len(self._get(demo, "actions"))
            for start in range(0, steps, STEPS_AT_ONCE):
                rows = slice(start, min(start + STEPS_AT_ONCE, steps))
                yield self._read(demo, rows, is_last=rows.stop == steps)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, demo: str, rows: slice, *, is_last: bool) -> Piece:
        group = self._file[demo]
        count = rows.stop - rows.start
        reward = np.zeros(count, self._reward_dtype)
        if "rewards" in group:
            reward = np.asarray(group["rewards"][rows])
        terminated = np.zeros(count, np.bool_)
        if "dones" in group:
            terminated = np.asarray(group["dones"][rows]) != 0
        keys = list(self.observation_space)
        return Piece(
            obs={key: self._read_rows(demo, f"obs/{key}", rows) for key in keys},
            action=self._read_rows(demo, "actions", rows),
            reward=reward,
            terminated=terminated,
            extras={},
            is_last=is_last,
            next_obs={key: self._read_rows(demo, f"next_obs/{key}", rows) for key in keys}
            if "next_obs" in group
            else None,
        )

    def _read_rows(self, demo: str, name: str, rows: slice) -> Array:
        array = np.asarray(self._get(demo, name)[rows])
        if len(array) != rows.stop - rows.start:
            raise ArgumentError(
                f"{self._path}: {demo}/{name} has {rows.start + len(array)} rows, but {demo}/actions has more. Record "
                "the demonstration again, or remove it from the file."
            )
        return array

    def _read_space(self, demo: str, name: str) -> spaces.Box:
        dataset = self._get(demo, name)
        return stored_space(tuple(dataset.shape[1:]), dataset.dtype)

    def _get(self, demo: str, name: str) -> Any:
        """Return a group or a data set of HDF5. Raise ArgumentError if it does not exist."""
        member = self._file.get(f"{demo}/{name}")
        if member is not None:
            return member
        remedy = "Remove the demonstration from the file, or record it again."
        if name.startswith("obs") and "obs" not in self._file[demo]:
            remedy = "Extract observations first, with robomimic's script dataset_states_to_obs.py."
        raise ArgumentError(f"{self._path} has no {demo}/{name}. {remedy}")

    def _list_demos(self) -> list[str]:
        group = self._file.get("data")
        names = [name for name in group or () if name.startswith(_DEMO) and name[len(_DEMO) :].isdecimal()]
        if not names:
            raise ArgumentError(
                f"{self._path} has no data/demo_0, so it is not a data set of robomimic. Pass another file."
            )
        return [f"data/{name}" for name in sorted(names, key=lambda name: int(name[len(_DEMO) :]))]

    def _read_metadata(self) -> dict[str, Any]:
        """Return the arguments of the environment and its control frequency, if the file has them."""
        metadata: dict[str, Any] = {"source": "robomimic", "episodes": len(self._demos)}
        env_args = self._file["data"].attrs.get("env_args")
        if isinstance(env_args, str | bytes):
            try:
                metadata["env_args"] = json.loads(env_args)
            except ValueError:
                return metadata
            frequency = metadata["env_args"].get("env_kwargs", {}).get("control_freq")
            if isinstance(frequency, int | float) and frequency > 0:
                metadata["fps"] = float(frequency)
        return metadata


def _open(path: Path) -> Any:
    try:
        import h5py  # noqa: PLC0415  an extra
    except ImportError as error:
        raise MissingPackageError(
            "Files of robomimic need h5py, which is not installed. Run: pip install 'holdall[datasets]'"
        ) from error
    if not path.is_file():
        raise ArgumentError(f"source ({str(path)!r}) is not a file. Pass an HDF5 file of robomimic.")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise ArgumentError(
            f"source ({str(path)!r}) cannot be opened as HDF5 ({error}). If a recording is still being written, wait "
            "until the program that records has closed the file."
        ) from error
