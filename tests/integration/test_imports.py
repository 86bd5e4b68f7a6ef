"""Recorded data sets of LeRobot and robomimic are imported to checkpoints bit for bit."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

import holdall
from holdall.cli import app
from holdall.errors import ArgumentError
from holdall.machine import held_bytes
from holdall.testing import assert_same_bits
from holdall.tools.imports import READERS, import_recording
from holdall.tools.imports import recording as recording_module

FPS = 10
LENGTHS = (5, 1, 300, 7)
"""Steps of the episodes. One episode is longer than one read."""


class Episode(NamedTuple):
    """The recorded arrays of an episode."""

    top: NDArray[np.uint8]
    wrist: NDArray[np.uint8]
    state: NDArray[np.float32]
    action: NDArray[np.float32]
    reward: NDArray[np.float32]
    done: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.reward)


def make_episodes() -> list[Episode]:
    generator = np.random.default_rng(0)
    episodes = []
    for number, length in enumerate(LENGTHS):
        done = np.zeros(length, np.bool_)
        done[-1] = number % 2 == 0
        episodes.append(
            Episode(
                np.repeat(generator.integers(0, 256, (length, 16, 16, 1), np.uint8), 3, axis=3),
                generator.integers(0, 256, (length, 8, 12, 3), np.uint8),
                generator.random((length, 3), np.float32),
                generator.random((length, 2), np.float32),
                generator.random(length, np.float32),
                done,
            )
        )
    return episodes


EPISODES = make_episodes()


def require_same(dataset: holdall.Dataset, episodes: list[Episode], *, drops_last: bool = False) -> None:
    """Compare every step of a dataset with the recorded episodes."""
    index = 0
    for episode in episodes:
        count = len(episode)
        if drops_last and not episode.done[-1]:
            count -= 1
        for step in range(count):
            row = dataset[index]
            following = min(step + 1, len(episode) - 1)
            assert_same_bits(row["observation.images.top"], episode.top[step])
            assert_same_bits(row["next_observation.images.top"], episode.top[following])
            assert_same_bits(row["observation.images.wrist"], episode.wrist[step])
            assert_same_bits(row["observation.state"], episode.state[step])
            assert_same_bits(row["next_observation.state"], episode.state[following])
            assert_same_bits(row["action"], episode.action[step])
            assert_same_bits(row["reward"], episode.reward[step])
            assert bool(row["terminated"]) == bool(episode.done[step])
            assert bool(row["truncated"]) == (step == count - 1 and not episode.done[step])
            index += 1
    assert len(dataset) == index


# ---------------------------------------------------------------- LeRobot

FEATURES: dict[str, dict[str, Any]] = {
    "observation.images.top": {"dtype": "video", "shape": [16, 16, 3]},
    "observation.images.wrist": {"dtype": "image", "shape": [8, 12, 3]},
    "observation.state": {"dtype": "float32", "shape": [3]},
    "action": {"dtype": "float32", "shape": [2]},
    "next.reward": {"dtype": "float32", "shape": [1]},
    "next.done": {"dtype": "bool", "shape": [1]},
    "timestamp": {"dtype": "float32", "shape": [1]},
    "frame_index": {"dtype": "int64", "shape": [1]},
    "episode_index": {"dtype": "int64", "shape": [1]},
    "index": {"dtype": "int64", "shape": [1]},
    "task_index": {"dtype": "int64", "shape": [1]},
}


def write_video(path: Path, frames: NDArray[np.uint8]) -> None:
    """Write frames to a lossless video."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264rgb", rate=FPS, options={"qp": "0", "preset": "ultrafast"})
        stream.height = frames.shape[1]
        stream.width = frames.shape[2]
        stream.pix_fmt = "rgb24"
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def make_table(episode: Episode, number: int, first: int) -> Any:
    import pyarrow as pa
    from PIL import Image

    def encode_png(pixels: NDArray[np.uint8]) -> dict[str, Any]:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        return {"bytes": file.getvalue(), "path": None}

    count = len(episode)
    steps = np.arange(count)
    return pa.table(
        {
            "observation.images.wrist": pa.array([encode_png(each) for each in episode.wrist]),
            "observation.state": pa.FixedSizeListArray.from_arrays(pa.array(episode.state.reshape(-1)), 3),
            "action": pa.array(list(episode.action), pa.list_(pa.float32())),
            "next.reward": episode.reward,
            "next.done": episode.done,
            "timestamp": (steps / FPS).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(count, number),
            "index": first + steps,
            "task_index": np.full(count, number % 2),
        }
    )


def write_lerobot(root: Path, version: str) -> Path:
    pa = pytest.importorskip("pyarrow", reason="needs the extra [datasets]")
    pytest.importorskip("av", reason="needs the extra [datasets]")
    import pyarrow.parquet as pq

    tables = []
    first = 0
    for number, episode in enumerate(EPISODES):
        tables.append(make_table(episode, number, first))
        first += len(episode)
    (root / "meta").mkdir(parents=True)
    info = {"codebase_version": version, "fps": FPS, "features": FEATURES, "total_frames": first, "chunks_size": 1000}
    if version == "v3.0":
        info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        (root / "data/chunk-000").mkdir(parents=True)
        pq.write_table(pa.concat_tables(tables[:2]), root / "data/chunk-000/file-000.parquet")
        pq.write_table(pa.concat_tables(tables[2:]), root / "data/chunk-000/file-001.parquet")
        key = "observation.images.top"
        rows: list[dict[str, float]] = []
        for file, numbers in enumerate(((0, 1, 2), (3,))):
            frames = np.concatenate([EPISODES[number].top for number in numbers])
            write_video(root / f"videos/{key}/chunk-000/file-{file:03d}.mp4", frames)
            start = 0
            for number in numbers:
                rows.append({"episode_index": number, f"videos/{key}/chunk_index": 0, f"videos/{key}/file_index": file})
                rows[-1][f"videos/{key}/from_timestamp"] = start / FPS
                start += len(EPISODES[number])
        (root / "meta/episodes/chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), root / "meta/episodes/chunk-000/file-000.parquet")
        pq.write_table(pa.table({"task_index": [0, 1], "task": ["push", "pull"]}), root / "meta/tasks.parquet")
    else:
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        (root / "data/chunk-000").mkdir(parents=True)
        for number, table in enumerate(tables):
            pq.write_table(table, root / f"data/chunk-000/episode_{number:06d}.parquet")
            write_video(
                root / f"videos/chunk-000/observation.images.top/episode_{number:06d}.mp4", EPISODES[number].top
            )
        lines = [json.dumps({"task_index": number, "task": name}) for number, name in enumerate(("push", "pull"))]
        (root / "meta/tasks.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (root / "meta/info.json").write_text(json.dumps(info), encoding="utf-8")
    return root


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_lerobot_data_set_is_imported(version: str, tmp_path: Path) -> None:
    root = write_lerobot(tmp_path / "recorded", version)
    url = tmp_path / "imported" / "pusht"
    done = CliRunner().invoke(app, ["checkpoint", "import", f"lerobot:{root}", str(url), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["transitions"] == sum(LENGTHS)
    assert [each.name for each in url.parent.iterdir()] == ["pusht"]  # Temporary files were deleted.
    deltas = {"observation.images.top": [-0.1, 0.0], "action": [0.0, 0.1, 0.2]}
    with holdall.Dataset.open(url) as dataset, holdall.Dataset.open(url, delta_timestamps=deltas) as windows:
        require_same(dataset, EPISODES)
        assert windows.fps == FPS
        assert json.loads(dataset.attached["dataset.json"])["tasks"] == ["push", "pull"]
        first = sum(LENGTHS[:2])
        row = windows[first]
        assert [float(row[key]) for key in ("timestamp", "episode_index", "task_index")] == [0.0, 2.0, 0.0]
        assert_same_bits(row["observation.images.top"], EPISODES[2].top[[0, 0]])
        assert row["observation.images.top_is_pad"].tolist() == [True, False]
        assert_same_bits(windows[first + 298]["action"], EPISODES[2].action[[298, 299, 299]])


def damage_dataset(root: Path, what: str) -> None:
    info = json.loads((root / "meta/info.json").read_text(encoding="utf-8"))
    parquet = root / "data/chunk-000/file-001.parquet"
    if what == "a file without its end":
        parquet.write_bytes(parquet.read_bytes()[:-40])
    elif what == "a missing file":
        parquet.unlink()
    elif what == "another fps":
        info["fps"] = 30
        video = root / "videos/observation.images.top/chunk-000/file-001.mp4"
        shutil.copy(root / "videos/observation.images.top/chunk-000/file-000.mp4", video)
        info["video_path"] = info["video_path"].replace("file_index:03d", "file_index:04d")
    elif what == "another shape":
        info["features"]["action"]["shape"] = [3]
    elif what == "no action":
        del info["features"]["action"]
    elif what == "an unknown version":
        info["codebase_version"] = "v1.6"
    elif what == "no info":
        (root / "meta/info.json").unlink()
        return
    (root / "meta/info.json").write_text(json.dumps(info), encoding="utf-8")


DAMAGES = {
    "a file without its end": "is not a complete Parquet file.*finalize",
    "a missing file": "has 6 frames, but meta/info.json says 313.*finalize",
    "another fps": "cannot be opened as a video",
    "another shape": "'action' has 2 values of float32 in 1 rows",
    "no action": "has no feature 'action'",
    "an unknown version": "holdall reads v2.0, v2.1, v3.0",
    "no info": "is not a LeRobotDataset",
}


@pytest.mark.parametrize("what", DAMAGES)
def test_the_error_of_a_wrong_lerobot_data_set_names_the_reason(what: str, tmp_path: Path) -> None:
    root = write_lerobot(tmp_path / "recorded", "v3.0")
    damage_dataset(root, what)
    with pytest.raises(ArgumentError, match=DAMAGES[what]):
        import_recording(READERS["lerobot"](root), lambda _done, _all: None)


def test_timestamps_that_differ_from_the_video_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = write_lerobot(tmp_path / "recorded", "v3.0")
    path = root / "data/chunk-000/file-001.parquet"
    table = pq.read_table(path)
    column = pa.array(table["timestamp"].to_numpy() * np.float32(2.5))
    pq.write_table(table.set_column(table.schema.get_field_index("timestamp"), "timestamp", column), path)
    with pytest.raises(ArgumentError, match=r"has no frame at .* fps in the data set differ"):
        import_recording(READERS["lerobot"](root), lambda _done, _all: None)


# ---------------------------------------------------------------- robomimic


def write_robomimic(path: Path, *, has_next: bool) -> Path:
    h5py = pytest.importorskip("h5py", reason="needs the extra [datasets]")
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(LENGTHS)
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "env_kwargs": {"control_freq": 20}})
        for number in reversed(range(len(EPISODES))):  # Names of demonstrations are sorted as numbers.
            episode = EPISODES[number]
            group = data.create_group(f"demo_{3 * number}")
            group.attrs["num_samples"] = len(episode)
            group["actions"] = episode.action
            group["rewards"] = episode.reward
            group["dones"] = episode.done.astype(np.int64)
            obs: dict[str, NDArray[Any]] = {
                "images.top": episode.top,
                "images.wrist": episode.wrist,
                "state": episode.state,
            }
            for key, rows in obs.items():
                group[f"obs/{key}"] = rows
                if has_next:
                    group[f"next_obs/{key}"] = np.concatenate([rows[1:], rows[-1:] + rows.dtype.type(1)])
    return path


def test_a_file_of_robomimic_is_imported(tmp_path: Path) -> None:
    file = write_robomimic(tmp_path / "low_dim.hdf5", has_next=False)
    for url, options in ((tmp_path / "all", []), (tmp_path / "known", ["--drop-last"])):
        done = CliRunner().invoke(app, ["checkpoint", "import", f"robomimic:{file}", str(url), *options])
        assert done.exit_code == 0, done.output
        with holdall.Dataset.open(url) as dataset:
            require_same(dataset, EPISODES, drops_last=bool(options))
            assert dataset.fps == 20


def test_recorded_next_observations_are_kept(tmp_path: Path) -> None:
    file = write_robomimic(tmp_path / "image.hdf5", has_next=True)
    with import_recording(READERS["robomimic"](file), lambda _done, _all: None) as memory:
        last = LENGTHS[0] - 1
        assert_same_bits(memory.gather([last]).next_obs["state"][0], EPISODES[0].state[last] + np.float32(1))
        assert len(memory) == sum(LENGTHS)


def test_the_error_of_a_wrong_robomimic_file_names_the_reason(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="needs the extra [datasets]")
    path = write_robomimic(tmp_path / "file.hdf5", has_next=False)

    def read() -> None:
        import_recording(READERS["robomimic"](path), lambda _done, _all: None).close()

    program = "import h5py, sys; file = h5py.File(sys.argv[1], 'a'); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        with pytest.raises(ArgumentError, match="wait until the program that records has closed the file"):
            read()
        writer.communicate(b"\n")
    with h5py.File(path, "a") as writing:
        del writing["data/demo_6/obs/state"]
    with pytest.raises(ArgumentError, match=r"has no data/demo_6/obs/state"):
        read()
    with h5py.File(path, "a") as writing:
        del writing["data/demo_0/obs"]
    with pytest.raises(ArgumentError, match="dataset_states_to_obs"):
        read()
    path.write_bytes(b"no file of HDF5")
    with pytest.raises(ArgumentError, match="cannot be opened as HDF5"):
        read()


# ---------------------------------------------------------------- memory


class NoiseRecording:
    """A recording of noise, which cannot be compressed."""

    def __init__(self, steps: int) -> None:
        from gymnasium import spaces

        self.observation_space = spaces.Dict({"image": spaces.Box(0, 255, (64, 64, 3), np.uint8)})
        self.action_space = spaces.Discrete(3)
        self.extras: dict[str, Any] = {}
        self.steps = steps
        self.metadata: dict[str, Any] = {}

    def pieces(self) -> Iterator[recording_module.Piece]:
        generator = np.random.default_rng(0)
        for start in range(0, self.steps, 100):
            image = generator.integers(0, 256, (100, 64, 64, 3), np.uint8)
            zeros = np.zeros(100)
            is_last = start + 100 == self.steps
            yield recording_module.Piece(
                {"image": image}, zeros.astype(np.int64), zeros, zeros.astype(np.bool_), {}, is_last
            )

    def close(self) -> None:
        pass


@pytest.mark.nightly
def test_an_import_keeps_most_of_its_data_on_disk(tmp_path: Path) -> None:
    """The test measures the process, because a report does not contain the memory of the import itself."""
    recording = NoiseRecording(12_000)
    image_bytes = 12_000 * 64 * 64 * 3
    held: list[int] = []
    before = held_bytes().unique
    with import_recording(
        recording, lambda _done, _all: held.append(held_bytes().unique), budget=None, spill_dir=tmp_path
    ) as memory:
        assert memory.disk_bytes > 0.6 * image_bytes
    assert max(held) - before < 0.5 * image_bytes
