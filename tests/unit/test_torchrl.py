"""HoldallStorage with TorchRL's writers, samplers and checkpoints, and the data that it refuses."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("torchrl")

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, tensorclass
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, SliceSampler
from torchrl.data.replay_buffers.writers import TensorDictMaxValueWriter, TensorDictRoundRobinWriter

import holdall
from holdall.errors import ArgumentError, CheckpointError
from holdall.torchrl import HoldallStorage, StoredTensor


def make_steps(count: int, first: int = 0, size: int = 12) -> TensorDictBase:
    """Return an episode's steps: stacks of 4 frames that shift, with a reward of their own."""
    frames = (torch.arange(first, first + count + 4) * 37 % 251).to(torch.uint8)
    frames = frames[:, None, None].expand(-1, size, size)
    stacks = torch.stack([frames[k : k + count + 1] for k in range(4)], dim=1)
    done = (torch.arange(first, first + count) % 5 == 4)[:, None]
    return TensorDict(
        {
            "pixels": stacks[:-1].clone(),
            "action": torch.arange(first, first + count),
            "done": torch.zeros(count, 1, dtype=torch.bool),
            "next": {
                "pixels": stacks[1:].clone(),
                "reward": torch.arange(first, first + count, dtype=torch.float32)[:, None],
                "done": done,
                "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
        },
        batch_size=[count],
    )


def require_same(held: Any, wanted: Any) -> None:
    assert held.batch_size == wanted.batch_size
    assert set(held.keys(include_nested=True)) == set(wanted.keys(include_nested=True))
    for key in wanted.keys(include_nested=True, leaves_only=True):
        assert held.get(key).dtype == wanted.get(key).dtype
        assert torch.equal(held.get(key), wanted.get(key)), key


def make_buffer(size: int = 50, count: int = 40, **named: Any) -> tuple[ReplayBuffer, TensorDictBase]:
    buffer = ReplayBuffer(storage=HoldallStorage(size, **named), batch_size=8)
    data = make_steps(count)
    buffer.extend(data)
    return buffer, data


def test_each_frame_of_stacks_and_next_stacks_is_stored_once() -> None:
    buffer = ReplayBuffer(storage=HoldallStorage(800), batch_size=8)
    data = make_steps(600, size=40)
    buffer.extend(data)
    pixels = next(field for field in buffer.storage.memory.report().fields if field.name == "obs.pixels")
    plain = data["pixels"].nbytes + data["next", "pixels"].nbytes
    # Of 8 frames in every step one is new. The first steps are stored whole, until the window is found.
    assert pixels.total_bytes * 6 < plain
    assert "window of 4" in pixels.finding


def test_rewards_and_flags_are_those_of_the_memory() -> None:
    """Samplers and reports of holdall read rewards and flags from the memory."""
    buffer, data = make_buffer()
    rows = buffer.storage.memory.gather(np.arange(40))
    assert np.array_equal(rows.reward, data["next", "reward"].numpy().reshape(rows.reward.shape))
    assert np.array_equal(rows.terminated, data["next", "terminated"].numpy().reshape(40))
    assert rows.terminated.any()
    assert not rows.truncated.any()


def test_writing_to_a_stored_tensor_counts_as_a_change() -> None:
    """TorchRL's samplers keep what they computed from a storage until its revision changes."""
    buffer, _ = make_buffer()
    for key in ("action", "done", ("next", "reward")):
        before = buffer.storage._mutation_revision
        buffer.storage[:].get(key)[3:5] = 1
        assert buffer.storage._mutation_revision > before
        assert (buffer.storage[3:5].get(key) == 1).all()


def test_a_size_may_be_written_as_a_float() -> None:
    assert HoldallStorage(1e3).max_size == 1000


def test_an_extend_longer_than_the_storage_keeps_the_last_elements() -> None:
    buffer, data = make_buffer(30, 100)
    require_same(buffer.storage[torch.arange(100) % 30][70:], data[70:])
    assert len(buffer) == 30


def test_elements_that_are_not_overwritten_stay_while_others_are_replaced() -> None:
    buffer, data = make_buffer(64, 64)
    kept = torch.arange(0, 64, 2)
    replaced = torch.arange(1, 64, 2)
    for turn in range(8):
        buffer.storage[replaced] = make_steps(32, first=1000 * turn)
        require_same(buffer.storage[kept], data[kept])
        require_same(buffer.storage[replaced], make_steps(32, first=1000 * turn))


def test_the_writer_of_best_values_keeps_the_best() -> None:
    buffer = TensorDictReplayBuffer(
        storage=HoldallStorage(10), writer=TensorDictMaxValueWriter(rank_key=("next", "reward")), batch_size=4
    )
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    for some in order.reshape(10, 20):
        buffer.extend(make_steps(200)[some])
    held = buffer.storage[torch.arange(10)]
    assert sorted(held["next", "reward"].flatten().tolist()) == list(map(float, range(190, 200)))
    require_same(held.exclude("index"), make_steps(200)[held["action"]])


def test_prioritized_draws_are_those_of_lazy_tensors() -> None:
    drawn = []
    for storage in (HoldallStorage(60), LazyTensorStorage(60)):
        try:
            sampler = PrioritizedSampler(60, 0.7, 0.9)
        except RuntimeError as error:
            pytest.skip(f"this TorchRL has no compiled trees ({error})")
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=16, priority_key="error")
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002  The sampler draws from this generator.
        for turn in range(6):
            buffer.extend(make_steps(25, first=25 * turn))
            sample = buffer.sample()
            sample["error"] = sample["next", "reward"].flatten() + 1
            buffer.update_tensordict_priority(sample)
        drawn.append(buffer.sample())
    require_same(*drawn)


def test_a_trajectory_sampler_reads_one_key_of_all_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(
        storage=HoldallStorage(50), sampler=SliceSampler(num_slices=2, end_key=("next", "done")), batch_size=10
    )
    buffer.extend(make_steps(50))
    gathered = []
    whole = holdall.ReplayMemory.gather

    def counted(memory: holdall.ReplayMemory, ids: Any) -> holdall.Batch:
        gathered.append(len(ids))
        return whole(memory, ids)

    monkeypatch.setattr(holdall.ReplayMemory, "gather", counted)
    sample = buffer.sample()
    assert (sample["action"].reshape(2, 5).diff() == 1).all()
    assert set(gathered) == {10}  # Not all 50.


def test_a_slice_is_read_when_it_is_used_and_written_when_it_is_changed() -> None:
    buffer, data = make_buffer()
    whole = buffer.storage[:]
    assert all(isinstance(tensor, StoredTensor) for tensor in whole.values(include_nested=True, leaves_only=True))
    require_same(whole, data)
    require_same(whole[3:17:2], data[3:17:2])
    assert whole["action"].tolist() == data["action"].tolist()
    buffer.set_at_("action", torch.tensor([-1, -2]), torch.tensor([4, 9]))
    data["action"][[4, 9]] = torch.tensor([-1, -2])
    buffer.storage[:]["next", "reward"].zero_()
    data["next", "reward"].zero_()
    require_same(buffer.storage[:], data)


def test_one_element_of_a_slice_is_read_and_written_alone() -> None:
    buffer, data = make_buffer()
    for key in data.keys(include_nested=True, leaves_only=True):
        assert torch.equal(buffer.storage[:].get(key)[3], data.get(key)[3]), key
        assert torch.equal(buffer.storage[3].get(key), data[3].get(key)), key
    buffer.storage[:]["next", "reward"][3] = 7
    data["next", "reward"][3] = 7
    require_same(buffer.storage[:], data)


def test_cells_of_two_dimensions_are_read_and_written_one_by_one() -> None:
    data = torch.stack([make_steps(20, first=100 * lane) for lane in range(3)])  # The axes are environments and time.
    buffers = [ReplayBuffer(storage=storage(90, ndim=2)) for storage in (HoldallStorage, LazyTensorStorage)]
    for buffer in buffers:
        buffer.extend(data.clone())
        buffer[1, 3:5] = make_steps(2, first=7000)
    ours, theirs = (buffer.storage for buffer in buffers)
    assert ours.memory.num_envs == 3
    index = (torch.tensor([3, 4, 19]), torch.tensor([1, 1, 2]))
    require_same(ours[index], theirs[index])
    require_same(ours[:], theirs[:])
    assert (len(ours), ours.shape) == (len(theirs), theirs.shape)


def test_elements_that_are_trajectories_come_back_whole() -> None:
    data = torch.stack([make_steps(20, first=100 * lane) for lane in range(30)])
    buffer = ReplayBuffer(storage=HoldallStorage(20), batch_size=4)
    buffer.extend(data)
    assert len(buffer) == 20
    require_same(buffer.storage[torch.arange(20)], torch.cat([data[20:], data[10:20]]))


def test_data_without_next_is_compressed_too() -> None:
    data = make_steps(1500).exclude("next")
    buffer = ReplayBuffer(storage=HoldallStorage(2000), batch_size=8)
    buffer.extend(data)
    require_same(buffer.storage[:], data)
    pixels = next(field for field in buffer.storage.memory.report().fields if field.name == "obs.pixels")
    assert pixels.total_bytes * 3 < data["pixels"].nbytes


def test_tensors_and_tensorclasses_come_back_with_their_type() -> None:
    @tensorclass
    class Pair:
        one: torch.Tensor
        other: torch.Tensor

    buffer = ReplayBuffer(storage=HoldallStorage(10), batch_size=2)
    buffer.extend(torch.arange(30).reshape(10, 3))
    assert torch.equal(buffer.storage[torch.tensor([9, 0])], torch.tensor([[27, 28, 29], [0, 1, 2]]))
    loaded = HoldallStorage(10)
    loaded.load_state_dict(buffer.storage.state_dict())
    assert torch.equal(loaded[3], torch.tensor([9, 10, 11]))
    pairs = ReplayBuffer(storage=HoldallStorage(10), batch_size=2)
    pairs.extend(Pair(torch.arange(5), torch.rand(5, 2), batch_size=[5]))  # type: ignore[call-arg]  # It accepts this argument.
    assert type(pairs.storage[torch.tensor([2])]) is Pair
    assert pairs.storage[2].one == 2


@pytest.mark.parametrize("way", ["dumps", "state_dict", "pickle"])
def test_a_loaded_buffer_continues_where_it_was_saved(tmp_path: Path, way: str) -> None:
    buffer, _ = make_buffer(50, 70)
    wanted = buffer.storage[torch.arange(50)].clone()
    loaded = ReplayBuffer(storage=HoldallStorage(50), batch_size=8)
    if way == "dumps":
        buffer.dumps(tmp_path)
        loaded.loads(tmp_path)
    elif way == "state_dict":
        torch.save(buffer.state_dict(), tmp_path / "state.pt")
        loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    else:
        loaded.set_storage(pickle.loads(pickle.dumps(buffer.storage)))
        loaded.writer._cursor = buffer.writer._cursor
        loaded.writer.register_storage(loaded.storage)
    require_same(loaded.storage[:], wanted)
    assert (len(loaded), loaded.storage._last_cursor_index) == (50, 19)
    for each in (buffer, loaded):
        each.extend(make_steps(13, first=500))
    require_same(loaded.storage[:], buffer.storage[:])


def test_a_second_save_keeps_files_of_the_first(tmp_path: Path) -> None:
    buffer, _ = make_buffer(4000, 3000)
    buffer.storage.dumps(tmp_path)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    buffer.extend(make_steps(10, first=9000))
    buffer.storage.dumps(tmp_path)
    assert before & {path for path in tmp_path.rglob("*") if path.is_file()}


def test_a_state_dict_of_torchrls_own_storage_is_loaded() -> None:
    data = make_steps(20)
    saved = LazyTensorStorage(50)
    saved.set(range(20), data)
    storage = HoldallStorage(50)
    storage.load_state_dict(saved.state_dict())
    require_same(storage[:], data)
    assert len(storage) == 20


def test_an_emptied_storage_can_be_written_to() -> None:
    buffer, _ = make_buffer()
    buffer.empty()
    assert len(buffer) == 0
    buffer.extend(make_steps(3, first=77))
    require_same(buffer.storage[:], make_steps(3, first=77))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another key": (lambda: make_steps(2).set("more", torch.zeros(2)), "unknown keys"),
    "a key less": (lambda: make_steps(2).exclude("action"), "misses the keys"),
    "another dtype": (lambda: make_steps(2).set("action", torch.zeros(2)), "Nothing is cast"),
    "another shape": (lambda: make_steps(2, size=13), "pass tensors of that shape"),
    "a dict": (lambda: {"action": torch.zeros(2)}, "TensorDict"),
    "text": (lambda: make_steps(2).set("name", ["a", "b"]), "not a tensor"),
    "unequal shapes": (
        lambda: LazyStackedTensorDict(make_steps(2)[0], make_steps(2, size=13)[0], stack_dim=0),
        "Pad them",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_data_that_does_not_fit_is_refused_and_changes_nothing(kind: str) -> None:
    make, says = REFUSED[kind]
    buffer, data = make_buffer()
    before = buffer.storage.memory.next_id
    with pytest.raises(ArgumentError, match=says):
        buffer.storage.set(torch.arange(40, 42), make())
    assert (len(buffer.storage), buffer.storage.memory.next_id) == (40, before)
    require_same(buffer.storage[:], data)


def fail_extends(patch: pytest.MonkeyPatch, after: int) -> None:
    """Make every call of `ReplayMemory.extend` fail, except for the next `after` calls."""
    extend = holdall.ReplayMemory.extend
    allowed = iter(range(after))

    def fail_later(memory: holdall.ReplayMemory, *args: Any, **named: Any) -> None:
        if next(allowed, None) is None:
            raise OSError("The disk is full.")
        extend(memory, *args, **named)

    patch.setattr(holdall.ReplayMemory, "extend", fail_later)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_after_a_write_that_fails_each_position_has_its_old_or_its_new_element(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The memory has room for 16 elements more, so writing 32 elements takes several calls of `extend`."""
    buffer, old = make_buffer(64, 64)
    replaced = torch.arange(1, 64, 2)
    # Elements that stay are the oldest of the memory, and have to be appended again.
    buffer.storage[replaced] = make_steps(32, first=100)
    old[replaced] = make_steps(32, first=100)
    new = old.clone()
    new[replaced] = make_steps(32, first=200)
    with monkeypatch.context() as patch:
        fail_extends(patch, after)
        with pytest.raises(OSError, match="disk is full"):
            buffer.storage[replaced] = new[replaced]
    held = buffer.storage[torch.arange(64)]
    is_new = held["action"] == new["action"]
    require_same(held[is_new], new[is_new])
    require_same(held[~is_new], old[~is_new])
    if after == 0:
        require_same(held, old)
    buffer.storage[replaced] = new[replaced]
    require_same(buffer.storage[torch.arange(64)], new)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"max_size": 0}, "max_size"),
        ({"max_size": 10, "ndim": 0}, "ndim"),
        ({"max_size": 10, "budget": "1GiB"}, "spill_dir"),
        ({"max_size": 10, "prefer": "nothing"}, "prefer"),
    ],
)
def test_wrong_settings_are_refused(named: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        HoldallStorage(**named).set(0, make_steps(1)[0])


def test_data_of_too_few_dimensions_is_refused() -> None:
    with pytest.raises(ArgumentError, match="ndim=2"):
        HoldallStorage(10, ndim=2).set(torch.arange(3), make_steps(3))


def test_positions_outside_of_the_storage_are_refused() -> None:
    buffer, _ = make_buffer()
    with pytest.raises(IndexError, match="50 positions"):
        buffer.storage.set(torch.tensor([50]), make_steps(1))
    with pytest.raises(IndexError):
        buffer.storage.get(45)


def test_other_checkpoints_are_refused_and_the_storage_stays_as_it_was(tmp_path: Path) -> None:
    buffer, data = make_buffer()
    with holdall.ReplayMemory(spaces.Box(0, 1, (3,)), spaces.Discrete(2), 10) as memory:
        memory.save(tmp_path / "other").result()
    make_buffer(60)[0].storage.dumps(tmp_path / "longer")
    with pytest.raises(CheckpointError, match="HoldallStorage"):
        buffer.storage.loads(tmp_path / "other")
    with pytest.raises(ArgumentError, match="max_size=60"):
        buffer.storage.loads(tmp_path / "longer")
    require_same(buffer.storage[:], data)


def test_a_budget_with_a_disk_tier_holds_everything(tmp_path: Path) -> None:
    storage = HoldallStorage(6000, budget="64MiB", spill_dir=tmp_path)
    buffer = ReplayBuffer(storage=storage, batch_size=8)
    buffer.extend(make_steps(3000))
    require_same(buffer.storage[torch.arange(0, 3000, 100)], make_steps(3000)[torch.arange(0, 3000, 100)])
    storage.close()


# ---------------------------------------------------------------- writes of some keys


def make_latents(count: int, seed: int = 0) -> TensorDictBase:
    """Return latents as a world model stores them: bfloat16 as float32, and zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    deter = torch.randn(count, 100, generator=generator).bfloat16().float()
    stoch = torch.nn.functional.one_hot(torch.randint(0, 8, (count, 16), generator=generator), 8).float()
    return TensorDict({"deter": deter, "stoch": stoch}, batch_size=[count])


def make_latent_buffer(size: int = 300, count: int = 250) -> tuple[ReplayBuffer, TensorDictBase]:
    buffer = ReplayBuffer(storage=HoldallStorage(size), batch_size=8)
    data = make_steps(count).update(make_latents(count)).update({"value": torch.arange(count, dtype=torch.float32)})
    buffer.extend(data)
    return buffer, data


def test_some_keys_are_rewritten_in_place_and_nothing_is_appended() -> None:
    buffer, data = make_latent_buffer()
    storage = buffer.storage
    index = torch.tensor([3, 200, 3, 77])
    for turn in range(3):
        new = make_latents(4, seed=turn)
        storage[index] = new
        for place in (1, 2, 3):
            data[index[place]] = data[index[place]].update(new[place])
        require_same(storage[torch.arange(250)], data)
        assert storage.memory.next_id == 250
    assert {field.name for field in storage.memory.report().fields} >= {"extras.deter", "extras.stoch", "obs.pixels"}


@pytest.mark.parametrize("way", ["set_at_", "update_", "slice", "integer"])
def test_every_way_to_write_one_key_rewrites_it(way: str) -> None:
    buffer, data = make_latent_buffer()
    new = make_latents(250, seed=5)["deter"]
    if way == "set_at_":
        index = torch.tensor([4, 9])
        buffer.set_at_("deter", new[index], index)
        data["deter"][index] = new[index]
    elif way == "update_":
        buffer.update_(TensorDict({"deter": new}, [250]))
        data["deter"] = new
    elif way == "slice":
        buffer.storage[10:20] = TensorDict({"deter": new[10:20]}, [10])
        data["deter"][10:20] = new[10:20]
    else:
        buffer.storage[7] = TensorDict({"deter": new[7], "value": torch.tensor(-1.0)}, [])
        data["deter"][7] = new[7]
        data["value"][7] = -1
    require_same(buffer.storage[torch.arange(250)], data)
    assert buffer.storage.memory.next_id == 250


def test_cells_of_two_dimensions_are_rewritten_in_place() -> None:
    """R2-Dreamer does this. Each `extend` has one step of all environments."""
    buffer = ReplayBuffer(storage=HoldallStorage(120, ndim=2), batch_size=8)
    data = TensorDict({"image": torch.randint(0, 255, (40, 3, 300), dtype=torch.uint8)}, [40, 3])
    data.update(make_latents(120).reshape(40, 3))
    for step in data:
        buffer.extend(step.unsqueeze(1).clone())
    index = (torch.tensor([0, 39, 5]), torch.tensor([2, 0, 1]))
    new = make_latents(3, seed=1)
    for turn in range(2):
        buffer[index[1], index[0]] = new  # The buffer swaps both dimensions.
        data[index] = data[index].update(new)
        require_same(buffer.storage[:].clone().to_tensordict(), data)
        new = make_latents(3, seed=2 + turn)
    assert buffer.storage.memory.next_id == 120


def test_images_are_not_moved_to_extras_when_they_are_written_again() -> None:
    buffer = ReplayBuffer(storage=HoldallStorage(40), batch_size=8)
    data = TensorDict({"image": torch.randint(0, 255, (40, 600), dtype=torch.uint8), "t": torch.arange(40)}, [40])
    buffer.extend(data)
    buffer.storage[torch.tensor([1, 2])] = TensorDict({"image": data["image"][:2]}, [2])
    data["image"][1:3] = data["image"][:2].clone()
    require_same(buffer.storage[torch.arange(40)], data)
    assert any(field.name == "obs.image" for field in buffer.storage.memory.report().fields)


def test_rewritten_keys_are_saved_and_loaded(tmp_path: Path) -> None:
    buffer, data = make_latent_buffer()
    other, _ = make_latent_buffer(count=20)  # Its keys are not extras.
    buffer.storage[torch.arange(9)] = make_latents(9, seed=3)
    data[:9] = data[:9].update(make_latents(9, seed=3))
    buffer.dumps(tmp_path / "run")
    other.loads(tmp_path / "run")
    require_same(other.storage[torch.arange(250)], data)
    other.storage[torch.arange(3)] = make_latents(3, seed=4)
    assert other.storage.memory.next_id == 250


def test_a_write_of_some_keys_that_do_not_fit_changes_nothing() -> None:
    buffer, data = make_latent_buffer()
    for given, says in (
        ({"deter": torch.zeros(2, 99)}, r"data\[\('deter',\)\] has shape \(99,\)"),
        ({"deter": torch.zeros(2, 100).double()}, "dtype torch.float64"),
        ({"stoch": torch.zeros(2, 16, 8), "mean": torch.zeros(2)}, "unknown keys"),
    ):
        with pytest.raises(ArgumentError, match=says):
            buffer.storage[torch.tensor([0, 1])] = TensorDict(given, [2])
    require_same(buffer.storage[torch.arange(250)], data)


def test_records_are_updated_if_their_slot_was_not_written_again() -> None:
    """A learner sends TorchRL's conditional updates while other processes add."""
    buffer = TensorDictReplayBuffer(
        storage=HoldallStorage(8), writer=TensorDictRoundRobinWriter(track_generations=True), batch_size=4
    )
    index = buffer.extend(make_steps(8).update(make_latents(8)))
    generation = buffer.writer.generations_of(index)
    buffer.extend(make_steps(3, first=8).update(make_latents(3)))  # Takes the first three slots.
    new = make_latents(8, seed=9)
    result = buffer.update_if_present(index=index, generation=generation, patch={"deter": new["deter"]})
    assert result.updated_count == 5
    held = buffer.storage[torch.arange(8)]["deter"]
    assert torch.equal(held[3:], new["deter"][3:])
    assert torch.equal(held[:3], make_latents(3)["deter"])
