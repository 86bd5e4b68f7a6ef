"""`holdall checkpoint` with real checkpoints."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer as PlainReplayBuffer
from stable_baselines3.common.save_util import save_to_pkl
from typer.testing import CliRunner

from holdall import ReplayMemory
from holdall.checkpoint import CheckpointReader, Manifest, open_reader
from holdall.checkpoint.manifest import append_checksum, manifest_name, strip_checksum
from holdall.cli import app
from holdall.tools.exports import export_npz

VECTOR = spaces.Box(-1, 1, (4,), np.float32)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of three checkpoints. The newest one has an attached file."""
    generator = np.random.default_rng(0)
    flag = np.zeros(1, np.bool_)
    with ReplayMemory(VECTOR, spaces.Discrete(2), 100) as memory:
        for number in range(3):
            for _ in range(10):
                obs = generator.random((2, 1, 4), np.float32)
                memory.add(obs[0], np.zeros(1, np.int64), np.ones(1), obs[1], flag, flag)
            memory.save(tmp_path / "run", attach={"agent": b"w"} if number == 2 else None).result()
    return tmp_path / "run"


def run_command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def test_ls_names_the_checkpoints(run: Path) -> None:
    """It prints a table or JSON."""
    found = json.loads(run_command("ls", run, "--json").stdout)["checkpoints"]
    assert [entry["number"] for entry in found] == [3, 2, 1]
    assert [entry["transitions"] for entry in found] == [30, 20, 10]
    assert found[0]["attached"] == ["agent"]
    assert {entry["state"] for entry in found} == {"complete"}
    assert run_command("ls", run).exit_code == 0


def test_entries_that_are_not_transitions_are_not_listed_as_transitions(tmp_path: Path) -> None:
    row = np.zeros(2, np.float32)
    with ReplayMemory(spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(2), 50) as memory:
        for tick in range(30):
            memory.add(row, 0, 1.0, row, False, False, valid=np.array([tick % 3 == 0]))
        memory.save(tmp_path / "run").result()
    listed = json.loads(run_command("ls", tmp_path / "run", "--json").stdout)
    verified = json.loads(run_command("verify", tmp_path / "run", "--json").stdout)
    assert [found["checkpoints"][0]["transitions"] for found in (listed, verified)] == [10, 10]
    assert "checkpoint 1 is intact: 10 transitions" in run_command("verify", tmp_path / "run").stdout


def test_verify_finds_one_changed_byte(run: Path) -> None:
    """It names the file, and finds no other damage."""
    assert run_command("verify", run).exit_code == 0
    victim = max((run / "segments").iterdir())
    raw = bytearray(victim.read_bytes())
    raw[-20] ^= 1
    victim.write_bytes(raw)
    result = run_command("verify", run, "--json")
    assert result.exit_code == 3
    found = {entry["number"]: entry["damages"] for entry in json.loads(result.stdout)["checkpoints"]}
    assert [number for number, damages in found.items() if damages] == [3]
    assert found[3][0]["file"] == victim.name
    assert run_command("verify", run, "--number", 2).exit_code == 0


@pytest.mark.parametrize(("command", "is_decoded"), [("ls", False), ("verify", False), ("verify", True)])
def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(
    command: str, is_decoded: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory may remove an old checkpoint before or after its manifest is read."""
    reader = open_reader(run)
    lost = set(reader.manifest(1).files).difference(*(reader.manifest(number).files for number in (2, 3)))
    assert lost
    read = CheckpointReader.manifest

    def remove_and_read(reader: CheckpointReader, number: int) -> Manifest:
        if number != 1:
            return read(reader, number)
        decoded = read(reader, number) if is_decoded else None
        (run / "manifests" / manifest_name(1)).unlink()
        for name in lost:
            (run / "segments" / name).unlink()
        return decoded or read(reader, number)

    monkeypatch.setattr(CheckpointReader, "manifest", remove_and_read)
    done = run_command(command, run, "--json")
    assert done.exit_code == 0
    assert [entry["number"] for entry in json.loads(done.stdout)["checkpoints"]] == [3, 2]


def test_verify_of_a_number_that_does_not_exist_names_the_command_that_lists_them(run: Path) -> None:
    done = run_command("verify", run, "--number", 9)
    assert done.exit_code == 1
    assert f"{run} has no checkpoint 9. To list those that it has, run: holdall checkpoint ls {run}" in done.stderr


def test_gc_keeps_the_newest_checkpoints(run: Path) -> None:
    """The kept checkpoint can be loaded."""
    done = run_command("gc", run, "--keep", 1, "--json")
    result = json.loads(done.stdout)
    assert result["left"] == [3]
    assert "removing" in done.stderr
    assert result["freed_bytes"] > 0
    with ReplayMemory.load(run) as memory:
        assert len(memory) == 30


def test_a_checkpoint_is_exported_to_minari_and_imported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All transitions are the same. The progress ends at the number of all transitions."""
    pytest.importorskip("minari", reason="needs the extra [minari]")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    result = run_command("export", run, "robots/dog-v0")
    assert result.exit_code == 0, result.stderr
    assert "30 transitions in 30 episodes" in result.stdout
    assert "30/30" in result.stderr
    result = run_command("import", "minari:robots/dog-v0", tmp_path / "back")
    assert result.exit_code == 0, result.stderr
    assert "30/30" in result.stderr
    with ReplayMemory.load(run) as memory, ReplayMemory.load(tmp_path / "back") as back:
        ids = np.arange(30)
        assert np.array_equal(back.gather(ids).obs, memory.gather(ids).obs)
        assert np.array_equal(back.gather(ids).next_obs, memory.gather(ids).next_obs)


@pytest.mark.parametrize("source", ["minari:robots/dog-v0", "buffer.pkl"])
def test_drop_last_is_refused_for_sources_with_next_observations(source: str, tmp_path: Path) -> None:
    result = run_command("import", source, tmp_path / "back", "--drop-last")
    assert result.exit_code == 1
    assert "--drop-last does not apply to source" in result.stderr


def test_a_checkpoint_is_exported_to_npz(run: Path, tmp_path: Path) -> None:
    """The file has an array for each field. An existing file is not replaced."""
    file = tmp_path / "dog.npz"
    result = run_command("export", run, file)
    assert result.exit_code == 0, result.stderr
    assert "30 transitions" in result.stdout
    with np.load(file, allow_pickle=False) as arrays, ReplayMemory.load(run) as memory:
        batch = memory.gather(arrays["ids"])
        assert len(batch) == 30
        for name in ("obs", "next_obs", "action", "reward", "terminated", "truncated"):
            assert np.array_equal(arrays[name], getattr(batch, name)), name
    assert run_command("export", run, file).exit_code == 1


def add_axis(observation: Any) -> dict[str, Any]:
    """Return an observation with a leading axis for one environment."""
    box, number = observation["pair"]
    return {"camera/front": observation["camera/front"][None], "pair": (box[None], np.array([number]))}


def test_nested_observations_are_exported_to_npz(tmp_path: Path) -> None:
    """Every leaf has a member, also in a Tuple and with a slash in its key. An incomplete file is removed."""
    pair = spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)])
    space = spaces.Dict({"camera/front": spaces.Box(0, 255, (4, 4), np.uint8), "pair": pair})
    space.seed(0)
    no = np.zeros(1, np.bool_)
    seen = [space.sample() for _ in range(6)]
    with ReplayMemory(space, spaces.Discrete(2), 10) as memory:
        for before, after in itertools.pairwise(seen):
            batched = [add_axis(value) for value in (before, after)]
            memory.add(batched[0], np.zeros(1, np.int64), np.zeros(1, np.float32), batched[1], no, no)
        memory.save(tmp_path / "run").result()

        def fail(_done: int, _all: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export_npz(memory, tmp_path / "half.npz", fail)
    assert not (tmp_path / "half.npz").exists()
    assert run_command("export", tmp_path / "run", tmp_path / "dog.npz").exit_code == 0
    with np.load(tmp_path / "dog.npz", allow_pickle=False) as arrays:
        assert np.array_equal(arrays["obs/camera/front"], [each["camera/front"] for each in seen[:5]])
        assert np.array_equal(arrays["next_obs/pair/0"], [each["pair"][0] for each in seen[1:]])
        assert np.array_equal(arrays["obs/pair/1"].reshape(-1), [each["pair"][1] for each in seen[:5]])


def test_a_checkpoint_is_exported_to_stable_baselines3_and_imported(run: Path, tmp_path: Path) -> None:
    """The file is a pickle of Stable-Baselines3's buffer."""
    pytest.importorskip("stable_baselines3", reason="needs the extra [sb3]")
    result = run_command("export", run, tmp_path / "dog.pkl")
    assert result.exit_code == 0, result.stderr
    result = run_command("import", tmp_path / "dog.pkl", tmp_path / "back", "--trust")
    assert result.exit_code == 0, result.stderr
    with ReplayMemory.load(run) as memory, ReplayMemory.load(tmp_path / "back") as back:
        ids = np.arange(30)
        for name in ("obs", "next_obs", "reward", "terminated", "truncated"):
            assert np.array_equal(getattr(back.gather(ids), name), getattr(memory.gather(ids), name)), name


@pytest.mark.parametrize("name", ["dog.npz", "dog.pkl"])
def test_the_error_of_a_target_that_cannot_be_written_is_one_line(name: str, run: Path, tmp_path: Path) -> None:
    """A missing folder is made. A folder below a file cannot be made."""
    assert run_command("export", run, tmp_path / "new" / "folder" / name).exit_code == 0
    (tmp_path / "file").touch()
    done = run_command("export", run, tmp_path / "file" / name)
    assert done.exit_code == 1
    assert f"cannot be written: [Errno 17] File exists: '{tmp_path / 'file'}'. Free disk space" in done.stderr


def test_an_incomplete_pickle_is_removed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, _buffer: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("stable_baselines3.common.save_util.save_to_pkl", fail)
    done = run_command("export", run, tmp_path / "dog.pkl")
    assert "cannot be written: [Errno 28] No space left on device. Free disk space" in done.stderr
    assert not (tmp_path / "dog.pkl").exists()


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
def test_the_error_of_a_place_without_checkpoints_is_one_line(command: str, tmp_path: Path) -> None:
    """The place is not created."""
    result = run_command(command, tmp_path / "nowhere")
    assert result.exit_code == 1
    assert "No checkpoint found" in result.output
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "kind", ["dict", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("plain", "full"))]
)
def test_a_pickled_buffer_is_imported(kind: str, tmp_path: Path) -> None:
    """The checkpoint has every transition, oldest first."""
    space: Any = spaces.Dict({"a": VECTOR, "b": spaces.Box(0, 255, (3, 8, 8), np.uint8)})
    if kind == "dict":
        buffer: Any = DictReplayBuffer(40, space, spaces.Discrete(3), "cpu", 2)
    else:
        space = VECTOR
        buffer = PlainReplayBuffer(40, space, spaces.Discrete(3), "cpu", 2)
    generator = np.random.default_rng(1)
    added = []
    for step in range(33 if kind == "full" else 12):
        obs, following = ([space.sample() for _ in range(2)] for _ in range(2))
        both: list[Any] = [
            {key: np.stack([one[key] for one in rows]) for key in get_first(rows)} if kind == "dict" else np.stack(rows)
            for rows in (obs, following)
        ]
        done = generator.random(2) < 0.3
        infos = [{"TimeLimit.truncated": bool(done[lane] and step % 2)} for lane in range(2)]
        reward = generator.random(2).astype(np.float32)
        buffer.add(both[0], both[1], np.array([[step % 3], [1]]), reward, done, infos)
        added.append((both, reward, done, [bool(info["TimeLimit.truncated"]) for info in infos]))
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    assert run_command("import", tmp_path / "buffer.pkl", tmp_path / "run").exit_code == 1
    result = run_command("import", tmp_path / "buffer.pkl", tmp_path / "run", "--trust")
    assert result.exit_code == 0, result.output
    with ReplayMemory.load(tmp_path / "run") as memory:
        kept = added[-20:]
        assert len(memory) == 2 * len(kept)
        batch = memory.gather(np.arange(len(memory)))
        for step, (both, reward, done, cut) in enumerate(kept):
            rows = slice(2 * step, 2 * step + 2)
            for mine, theirs in ((batch.obs, both[0]), (batch.next_obs, both[1])):
                for key in theirs if kind == "dict" else [None]:
                    one, two = (mine, theirs) if key is None else (mine[key], theirs[key])
                    assert np.array_equal(one[rows], two)
            assert np.array_equal(batch.reward[rows], reward)
            assert (batch.terminated[rows] | batch.truncated[rows]).tolist() == done.tolist()
            assert batch.truncated[rows].tolist() == cut


def get_first(rows: list[Any]) -> Any:
    return rows[0]


@pytest.mark.nightly
def test_the_error_of_a_file_without_a_buffer_names_the_reason(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(b"no pickle")
    result = run_command("import", tmp_path / "x.pkl", tmp_path / "run", "--trust")
    assert result.exit_code == 1
    assert "could not be read" in result.output


@pytest.mark.parametrize("source", ["dog.csv", "runs/dog", "hdf5:dog.hdf5", "s3://bucket/dog.parquet"])
def test_a_source_of_an_unknown_kind_names_those_that_are_supported(tmp_path: Path, source: str) -> None:
    result = run_command("import", source, tmp_path / "run", "--trust")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    for kind in ("lerobot:", "robomimic:", "minari:", ".pkl"):
        assert kind in result.stderr


@pytest.mark.parametrize("target", ["dog.csv", "dog.hdf5", "dog"])
def test_a_target_of_an_unknown_kind_names_those_that_are_supported(run: Path, target: str) -> None:
    result = run_command("export", run, target)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    for kind in (".npz", ".pkl", "Minari"):
        assert kind in result.stderr


@pytest.mark.parametrize("time", [1e300, -1e300, float("nan"), float("inf")])
def test_ls_accepts_any_number_as_the_time_of_a_checkpoint(run: Path, time: float) -> None:
    """The time is only shown, so a manifest may have any number."""
    name = run / "manifests" / "0000000000000003.json"
    words = json.loads(strip_checksum(name.read_bytes()))
    name.write_bytes(append_checksum(json.dumps(words | {"time": time}).encode()))
    result = run_command("ls", run, "--json")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["checkpoints"]) == 3
    assert run_command("ls", run).exit_code == 0


def test_ls_shows_whole_dates_on_80_columns(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A date has the day and the second."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line for line in run_command("ls", run).stdout.splitlines() if "attached:" not in line]
    found = json.loads(run_command("ls", run, "--json").stdout)["checkpoints"]
    for entry, line in zip(found, lines[1:], strict=True):
        assert entry["saved"].partition("+")[0] in line
        assert "complete" in line
        assert len(line) <= 80


@pytest.mark.parametrize("name", ["dog", "robots/dog", "a b-v0", "../dog-v0", "dog-v0/"])
def test_a_name_that_minari_refuses_is_an_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No file is created."""
    pytest.importorskip("minari", reason="needs the extra [minari]")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    result = run_command("export", run, name)
    assert result.exit_code == 1
    assert "Minari dataset" in result.stderr
    assert not list(tmp_path.rglob("dog*"))
    assert run_command("import", f"minari:{name}", tmp_path / "back").exit_code == 1


def test_an_existing_dataset_is_not_replaced(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete dataset is removed."""
    pytest.importorskip("minari", reason="needs the extra [minari]")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    assert run_command("export", run, "robots/dog-v0").exit_code == 0
    result = run_command("export", run, "robots/dog-v0")
    assert result.exit_code == 1
    assert "already exists" in result.stderr
    assert run_command("import", "minari:robots/dog-v0", tmp_path / "back").exit_code == 0
    monkeypatch.setattr("minari.create_dataset_from_buffers", fail_without_space)
    assert run_command("export", run, "robots/cat-v0").exit_code == 1
    assert not list(tmp_path.rglob("cat*"))


def fail_without_space(dataset_id: str, **_: Any) -> None:
    path = Path(os.environ["MINARI_DATASETS_PATH"]) / dataset_id / "data"
    path.mkdir(parents=True)
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("steps", [7, 13])
def test_a_buffer_without_next_observations_is_imported(steps: int, tmp_path: Path) -> None:
    """If it is full, the oldest transition is left out: the newest next observation has overwritten its observation."""
    buffer = PlainReplayBuffer(
        10, VECTOR, spaces.Discrete(3), "cpu", optimize_memory_usage=True, handle_timeout_termination=False
    )
    seen = np.arange(4 * (steps + 1), dtype=np.float32).reshape(-1, 1, 4)
    for step in range(steps):
        buffer.add(seen[step], seen[step + 1], np.array([[1]]), np.array([step]), np.array([False]), [{}])
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    result = run_command("import", tmp_path / "buffer.pkl", tmp_path / "run", "--trust", "--json")
    assert result.exit_code == 0, result.output
    first = max(0, steps - 9)
    assert json.loads(result.stdout)["transitions"] == steps - first
    with ReplayMemory.load(tmp_path / "run") as memory:
        batch = memory.gather(np.arange(len(memory)))
    assert np.array_equal(batch.obs, seen[first:-1, 0])
    assert np.array_equal(batch.next_obs, seen[first + 1 :, 0])
    assert batch.reward.ravel().tolist() == list(range(first, steps))


def test_modules_in_the_working_directory_do_not_affect_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has a file `numpy.py`, and the module of the buffer's class."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('this must not run')")
    (tmp_path / "their_buffers.py").write_text(
        "from stable_baselines3.common.buffers import ReplayBuffer\nclass Own(ReplayBuffer):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    buffer: Any = __import__("their_buffers").Own(10, VECTOR, spaces.Discrete(3), "cpu")
    buffer.add(np.zeros((1, 4)), np.ones((1, 4)), np.array([[1]]), np.ones(1), np.zeros(1), [{}])
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    result = run_command("import", "buffer.pkl", "run", "--trust")
    assert result.exit_code == 0, result.output
