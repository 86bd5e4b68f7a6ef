"""LeRobotDataset on disk, versions 2.0, 2.1 and 3.0: Parquet files, and images in them or in videos.

Images become uint8 arrays of shape (height, width, channels). Frames of a video are the ones that PyAV decodes.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError, MissingPackageError
from holdall.schema import Array
from holdall.space_leaves import stored_space
from holdall.tools.imports.recording import STEPS_AT_ONCE, Piece

_VERSIONS = ("v2.0", "v2.1", "v3.0")
_OBSERVATION = "observation."
_SCALARS = ("timestamp", "frame_index", "episode_index", "task_index")
_NOT_STORED = ("index", "action", "next.reward", "next.done")
"""Features that are not extras: `index` is the transition id, and the others are fields of a transition."""


class RunOfSteps(NamedTuple):
    """Rows of a Parquet file that belong to one episode."""

    episode: int
    columns: dict[str, Any]  # Arrow arrays by feature.
    steps: int


class LeRobotRecording:
    """The episodes of a data set, in the order of its Parquet files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._arrow = _import_parquet()
        info = _read_info(root)
        self._info = info
        self._features: dict[str, Any] = info["features"]
        self._videos = {name for name, feature in self._features.items() if feature["dtype"] == "video"}
        self._images = {name for name, feature in self._features.items() if feature["dtype"] == "image"}
        self._files = sorted((root / "data").glob("*/*.parquet"))
        self._videos_being_read: dict[str, VideoFrames] = {}  # By feature.
        self._video_places: dict[int, dict[str, VideoPlace]] | None = None  # By episode; None: not read yet.
        self.steps = self._count_steps()
        self._observation_names = self._list_observations()
        self._extra_names = [
            name
            for name, feature in self._features.items()
            if not name.startswith(_OBSERVATION) and name not in _NOT_STORED and _is_number(feature["dtype"])
        ]
        self.observation_space, self.action_space = self._find_spaces()
        self.extras: dict[str, spaces.Space[Any]] = {
            name: stored_space(self._get_row_shape(name), np.dtype(self._features[name]["dtype"]))
            for name in self._extra_names
        }
        self.metadata = {
            "source": "lerobot",
            "codebase_version": info["codebase_version"],
            "fps": info["fps"],
            "episodes": info.get("total_episodes"),
            "robot_type": info.get("robot_type"),
            "tasks": self._read_tasks(),
        }

    def pieces(self) -> Iterator[Piece]:
        """Yield all episodes."""
        previous: RunOfSteps | None = None
        for run in self._read_runs():
            if previous is not None:
                yield self._make_piece(previous, is_last=run.episode != previous.episode)
            previous = run
        if previous is not None:
            yield self._make_piece(previous, is_last=True)

    def close(self) -> None:
        """Close the videos."""
        for frames in self._videos_being_read.values():
            frames.close()
        self._videos_being_read.clear()

    # ---------------------------------------------------------------- steps

    def _read_runs(self) -> Iterator[RunOfSteps]:
        """Yield the rows of all files, cut where the episode changes."""
        wanted = [name for name in self._features if name not in self._videos]
        for path in self._files:
            file = self._open(path)
            columns = [name for name in wanted if name in file.schema_arrow.names]
            for name in ("episode_index", "timestamp", *self._observation_names, "action"):
                if name not in columns and name not in self._videos:
                    raise ArgumentError(f"{path} has no column {name!r}, which meta/info.json names. Record it again.")
            for batch in file.iter_batches(STEPS_AT_ONCE, columns=columns):
                episodes = batch.column("episode_index").to_numpy(zero_copy_only=False)
                starts = [0, *(np.flatnonzero(np.diff(episodes)) + 1).tolist(), len(episodes)]
                for start, end in itertools.pairwise(starts):
                    part = batch.slice(start, end - start)
                    arrays = {name: part.column(name) for name in columns}
                    yield RunOfSteps(int(episodes[start]), arrays, end - start)

    def _make_piece(self, run: RunOfSteps, *, is_last: bool) -> Piece:
        reward = np.zeros(run.steps, np.float32)
        if "next.reward" in run.columns:
            reward = self._read_numbers(run, "next.reward").reshape(run.steps)
        terminated = np.zeros(run.steps, np.bool_)
        if "next.done" in run.columns:
            terminated = self._read_numbers(run, "next.done").reshape(run.steps).astype(np.bool_)
        return Piece(
            obs={name.removeprefix(_OBSERVATION): self._observe(run, name) for name in self._observation_names},
            action=self._read_numbers(run, "action"),
            reward=reward,
            terminated=terminated,
            extras={name: self._read_numbers(run, name) for name in self._extra_names},
            is_last=is_last,
        )

    def _observe(self, run: RunOfSteps, name: str) -> Array:
        if name in self._videos:
            times = np.asarray(run.columns["timestamp"].to_numpy(zero_copy_only=False), np.float64)
            return self._read_video(name, run.episode, times)
        if name in self._images:
            return np.stack([_decode_image(each, self._root) for each in run.columns[name].to_pylist()])
        return self._read_numbers(run, name)

    def _read_numbers(self, run: RunOfSteps, name: str) -> Array:
        """Return a numeric feature. Its rows are numbers or nested lists of numbers."""
        column = run.columns[name]
        while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
            column = column.flatten()
        flat = column.to_numpy(zero_copy_only=False)
        dtype = np.dtype(self._features[name]["dtype"])
        shape = (run.steps, *self._get_row_shape(name))
        if flat.dtype != dtype or flat.size != np.prod(shape):
            raise ArgumentError(
                f"{self._root}: {name!r} has {flat.size} values of {flat.dtype} in {run.steps} rows, but "
                f"meta/info.json says {shape[1:]} of {dtype} for each row. Correct meta/info.json."
            )
        rows: Array = flat.reshape(shape)
        return rows

    def _get_row_shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(int(length) for length in self._features[name]["shape"])
        is_scalar = name in _SCALARS or name.startswith("next.")
        return () if is_scalar and shape == (1,) else shape

    # ---------------------------------------------------------------- videos

    def _read_video(self, key: str, episode: int, times: NDArray[np.float64]) -> Array:
        place = self._find_video(key, episode)
        frames = self._videos_being_read.get(key)
        if frames is None or frames.path != place.path or times[0] + place.start_s < frames.time_s:
            if frames is not None:
                frames.close()
            frames = VideoFrames(place.path, 0.5 / float(self._info["fps"]))
            self._videos_being_read[key] = frames
        return np.stack([frames.read(time + place.start_s) for time in times.tolist()])

    def _find_video(self, key: str, episode: int) -> VideoPlace:
        """Return the video file of an episode, and the time in the video at which the episode begins."""
        template = self._info["video_path"]
        if self._info["codebase_version"] != "v3.0":
            chunk = episode // int(self._info.get("chunks_size", 1000))
            name = template.format(episode_chunk=chunk, video_key=key, episode_index=episode)
            return VideoPlace(self._root / name, 0.0)
        if self._video_places is None:
            self._video_places = self._read_video_places(template)
        place = self._video_places.get(episode, {}).get(key)
        if place is None:
            raise ArgumentError(
                f"{self._root}: meta/episodes does not name the video {key!r} of episode {episode}. If a recording is "
                "still running, wait, and call its finalize()."
            )
        return place

    def _read_video_places(self, template: str) -> dict[int, dict[str, VideoPlace]]:
        places: dict[int, dict[str, VideoPlace]] = {}
        for path in sorted((self._root / "meta" / "episodes").glob("*/*.parquet")):
            fields = ("chunk_index", "file_index", "from_timestamp")
            columns = ["episode_index", *(f"videos/{key}/{field}" for key in self._videos for field in fields)]
            for row in self._open(path).read(columns=columns).to_pylist():
                places[row["episode_index"]] = {
                    key: VideoPlace(
                        self._root
                        / template.format(
                            video_key=key,
                            chunk_index=row[f"videos/{key}/chunk_index"],
                            file_index=row[f"videos/{key}/file_index"],
                        ),
                        float(row[f"videos/{key}/from_timestamp"]),
                    )
                    for key in self._videos
                }
        return places

    # ---------------------------------------------------------------- contents of the data set

    def _open(self, path: Path) -> Any:
        try:
            return self._arrow.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"{path} is not a complete Parquet file ({error}). If a recording is still running, wait, and call its "
                "finalize()."
            ) from error

    def _count_steps(self) -> int:
        frames = sum(int(self._open(path).metadata.num_rows) for path in self._files)
        expected = self._info.get("total_frames")
        if frames == 0 or frames != expected:
            raise ArgumentError(
                f"{self._root} has {frames} frames, but meta/info.json says {expected}. If a recording is still "
                "running, wait, and call its finalize()."
            )
        return frames

    def _list_observations(self) -> list[str]:
        names = [name for name in self._features if name.startswith(_OBSERVATION)]
        names = [
            name for name in names if name in self._videos | self._images or _is_number(self._features[name]["dtype"])
        ]
        for name in ("action", names[0] if names else "observation.state"):
            if name not in self._features:
                raise ArgumentError(
                    f"{self._root}: meta/info.json has no feature {name!r}. Pass a data set with observations and "
                    "actions."
                )
        return names

    def _find_spaces(self) -> tuple[spaces.Dict, spaces.Box]:
        """Return the spaces of observations and actions. The first step determines their shapes."""
        run = next(self._read_runs())
        first = RunOfSteps(run.episode, {name: column.slice(0, 1) for name, column in run.columns.items()}, 1)
        named: dict[str, spaces.Space[Any]] = {}
        for name in self._observation_names:
            rows = self._observe(first, name)
            named[name.removeprefix(_OBSERVATION)] = stored_space(rows.shape[1:], rows.dtype)
        action = self._read_numbers(first, "action")
        return spaces.Dict(named), stored_space(action.shape[1:], action.dtype)

    def _read_tasks(self) -> list[str]:
        """Return the descriptions of tasks, by `task_index`."""
        tasks: dict[int, str] = {}
        lines = self._root / "meta" / "tasks.jsonl"
        table = self._root / "meta" / "tasks.parquet"
        if lines.is_file():
            for line in lines.read_text(encoding="utf-8").splitlines():
                task = json.loads(line)
                tasks[int(task["task_index"])] = str(task["task"])
        elif table.is_file():
            for row in self._open(table).read().to_pylist():
                number = int(row.pop("task_index"))
                tasks[number] = str(next(iter(row.values()), ""))
        return [tasks.get(number, "") for number in range(max(tasks, default=-1) + 1)]


class VideoPlace(NamedTuple):
    """Video file of an episode, and the time in the video at which the episode begins."""

    path: Path
    start_s: float


class VideoFrames:
    """The frames of a video, read from the first to the last.

    Attributes:
        path: The file.
        time_s: Time of the newest frame that was read.
    """

    def __init__(self, path: Path, tolerance_s: float) -> None:
        try:
            import av  # noqa: PLC0415  an extra
        except ImportError as error:
            raise MissingPackageError(
                "Videos of LeRobot need av, which is not installed. Run: pip install 'holdall[datasets]'"
            ) from error
        self.path = path
        self.time_s = -np.inf
        self._tolerance_s = tolerance_s
        try:
            self._container: Any = av.open(str(path))
        except (OSError, ValueError) as error:
            raise ArgumentError(f"{path} cannot be opened as a video ({error}). Copy the data set again.") from error
        self._decoded = self._container.decode(video=0)
        self._frame: Any = None

    def read(self, time_s: float) -> Array:
        """Return the frame at `time_s`. Calls must pass times in ascending order."""
        while self._frame is None or self._frame.time < time_s - self._tolerance_s:
            self._frame = next(self._decoded, None)
            if self._frame is None:
                break
            self.time_s = float(self._frame.time)
        if self._frame is None or self._frame.time > time_s + self._tolerance_s:
            raise ArgumentError(
                f"{self.path} has no frame at {time_s:.3f} s. The timestamps or fps in the data set differ from the "
                "video. Record it again."
            )
        pixels: Array = self._frame.to_ndarray(format="rgb24")
        return pixels

    def close(self) -> None:
        """Close the file."""
        self._container.close()


def _is_number(dtype: str) -> bool:
    try:
        return np.dtype(dtype).kind in "biuf"
    except TypeError:
        return False


def _decode_image(cell: Any, root: Path) -> Array:
    """Return the image in a cell of a Parquet file, or in the image file that the cell names."""
    from PIL import Image  # noqa: PLC0415  an extra

    content = cell["bytes"]
    source: Any = io.BytesIO(content) if content is not None else root / cell["path"]
    pixels = np.asarray(Image.open(source))
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _read_info(root: Path) -> dict[str, Any]:
    path = root / "meta" / "info.json"
    try:
        info: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"source ({str(root)!r}) is not a LeRobotDataset: meta/info.json cannot be read ({error}). Pass the folder "
            "that has meta, data and videos."
        ) from error
    missing = {"codebase_version", "fps", "features"} - info.keys()
    if missing:
        raise ArgumentError(f"{path} has no {sorted(missing)[0]!r}, which every LeRobotDataset has. Copy it again.")
    if info["codebase_version"] not in _VERSIONS:
        raise ArgumentError(
            f"{path} has codebase_version {info['codebase_version']!r}. holdall reads {', '.join(_VERSIONS)}. Convert "
            "the data set with LeRobot's own scripts."
        )
    return info


def _import_parquet() -> Any:
    try:
        import PIL.Image  # noqa: F401, PLC0415  an extra
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError(
            "Data sets of LeRobot need pyarrow and pillow, which are not installed. Run: "
            "pip install 'holdall[datasets]'"
        ) from error
    return pyarrow.parquet
