"""LeRobot's buffer over a memory: exact rows in 8-bit words, right next states, batches that resume."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdall.errors import ArgumentError, CheckpointError, ClosedError
from holdall.lerobot import ReplayBuffer, install
from holdall.lerobot.images import ImageEncoder, ImageForm, decode
from holdall.store.tuning import Tuning

FRONT = "observation.images.front"
WRIST = "observation.images.wrist"
VECTOR = "observation.state"
KEYS = [FRONT, WRIST, VECTOR]
SHAPE = (3, 16, 16)
TUNING = Tuning(block_bytes=40_000)  # So that blocks close and are compressed.

Transition = dict[str, Any]


def make_image(generator: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(generator.integers(0, 256, SHAPE).astype(np.uint8))


def observe(generator: np.random.Generator, *, is_resized: bool = False) -> dict[str, torch.Tensor]:
    """Return a state as LeRobot's actor sends it: with a batch axis, images divided by 255."""
    images = {key: make_image(generator)[None].float() / 255 for key in (FRONT, WRIST)}
    if is_resized:
        images = {key: torch.nn.functional.avg_pool2d(image, 3, 1, 1) for key, image in images.items()}
    return {**images, VECTOR: torch.from_numpy(generator.normal(size=(1, 5)).astype(np.float32))}


def play(count: int, seed: int = 0, *, is_resized: bool = False, length: int = 7) -> Iterator[Transition]:
    """Yield the transitions of episodes that end in turn by success and by a time limit."""
    generator = np.random.default_rng(seed)
    state = observe(generator, is_resized=is_resized)
    for i in range(count):
        following = observe(generator, is_resized=is_resized)
        is_end = i % length == length - 1
        is_success = (i // length) % 2 == 0
        yield {
            "state": state,
            "action": torch.from_numpy(generator.normal(size=(1, 3)).astype(np.float32)),
            "reward": float(generator.normal()),
            "next_state": following,
            "done": is_end and is_success,
            "truncated": is_end and not is_success,
            "complementary_info": {"discrete_penalty": torch.tensor([float(i)]), "is_intervention": i % 5 < 2},
        }
        state = observe(generator, is_resized=is_resized) if is_end else following


def make_buffer(capacity: int = 50, **settings: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, "cpu", KEYS, **{"use_drq": False, "_tuning": TUNING, **settings})


def fill(buffer: ReplayBuffer, transitions: list[Transition]) -> ReplayBuffer:
    for transition in transitions:
        buffer.add(**transition)
    return buffer


def require_row(batch: Any, row: int, wanted: Transition) -> None:
    """Compare all bits of one row."""
    for part in ("state", "next_state"):
        assert batch[part].keys() == wanted[part].keys()
        for key, tensor in batch[part].items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor[row].view(torch.int32), wanted[part][key][0].view(torch.int32)), (part, key)
    assert torch.equal(batch["action"][row], wanted["action"][0])
    assert batch["reward"][row] == np.float32(wanted["reward"])
    assert batch["done"][row] == float(wanted["done"])
    assert batch["truncated"][row] == float(wanted["truncated"])
    for key, value in wanted["complementary_info"].items():
        assert batch["complementary_info"][key][row] == float(value), key


def require_same(batch: Any, wanted: Any) -> None:
    for part in ("state", "next_state", "complementary_info"):
        assert batch[part].keys() == wanted[part].keys()
        for key in batch[part]:
            assert torch.equal(batch[part][key], wanted[part][key]), (part, key)
    for part in ("action", "reward", "done", "truncated"):
        assert torch.equal(batch[part], wanted[part]), part


class SlotRule:
    """The rule of LeRobot's buffer: a ring of transitions and, to save memory, the next slot's state.

    With `optimize_memory`, the next state of a row is the state in the slot after it, whatever was added there.
    """

    def __init__(self, capacity: int, *, optimize_memory: bool) -> None:
        self.rows: list[Transition] = []
        self.capacity = capacity
        self.optimize_memory = optimize_memory
        self.added = 0

    def add(self, transition: Transition) -> None:
        if len(self.rows) < self.capacity:
            self.rows.append(transition)
        else:
            self.rows[self.added % self.capacity] = transition
        self.added += 1

    def row(self, slot: int) -> Transition:
        if not self.optimize_memory:
            return self.rows[slot]
        return {**self.rows[slot], "next_state": self.rows[(slot + 1) % self.capacity]["state"]}

    def draw(self, count: int) -> list[int]:
        is_short = self.optimize_memory and len(self.rows) < self.capacity
        return torch.randint(0, len(self.rows) - is_short, (count,)).tolist()


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("optimize_memory", [False, True])
@pytest.mark.parametrize("count", [12, 50, 133])
@pytest.mark.parametrize("is_resized", [False, True])
def test_one_seed_draws_the_rows_of_lerobots_rule(count: int, optimize_memory: bool, is_resized: bool) -> None:
    rule = SlotRule(50, optimize_memory=optimize_memory)
    buffer = make_buffer(optimize_memory=optimize_memory, budget=None)
    for transition in play(count, is_resized=is_resized):
        rule.add(transition)
        buffer.add(**transition)
    for seed in range(4):
        torch.manual_seed(seed)
        slots = rule.draw(32)
        torch.manual_seed(seed)
        batch = buffer.sample(32)
        assert len(batch["reward"]) == min(32, len(buffer))
        for row, slot in enumerate(slots[: len(buffer)]):
            require_row(batch, row, rule.rows[slot])
    buffer.close()


def find_wrong_rows(transitions: list[Transition]) -> tuple[list[int], list[int]]:
    """Return the rows with a wrong next state that counts: of LeRobot's rule as its learner uses it, and of holdall."""
    rule = SlotRule(len(transitions), optimize_memory=True)
    buffer = make_buffer(len(transitions), optimize_memory=True)
    for transition in transitions:
        rule.add(transition)
        buffer.add(**transition)
    wrong: list[int] = []
    wrong_of_holdall: list[int] = []
    for slot in range(len(transitions) - 1):
        transition = transitions[slot]
        if transition["done"]:
            continue  # Its next state is not used.
        if not torch.equal(rule.row(slot)["next_state"][VECTOR], transition["next_state"][VECTOR]):
            wrong.append(slot)
        if not all(torch.equal(buffer.next_states[key][slot], transition["next_state"][key][0]) for key in KEYS):
            wrong_of_holdall.append(slot)
    buffer.close()
    return wrong, wrong_of_holdall


def test_next_states_are_right_at_time_limits() -> None:
    """The state in the next slot is the first one of another episode."""
    assert find_wrong_rows(list(play(30))) == ([13, 27], [])


def test_next_states_are_right_at_the_ends_of_interventions() -> None:
    """The learner's offline buffer gets the rows of interventions only."""
    transitions = [t for t in play(30, length=100) if t["complementary_info"]["is_intervention"]]
    assert find_wrong_rows(transitions) == ([1, 3, 5, 7, 9], [])


def test_next_states_are_right_before_rows_that_were_skipped() -> None:
    """The learner leaves out rows that contain NaN."""
    transitions = [t for i, t in enumerate(play(20, length=100)) if i not in {4, 11, 12}]
    assert find_wrong_rows(transitions) == ([3, 9], [])


def test_tensors_by_slot_show_the_ring() -> None:
    transitions = list(play(60))
    buffer = fill(make_buffer(50), transitions)
    assert (len(buffer), buffer.size, buffer.position, buffer.initialized) == (50, 50, 10, True)
    ring = [*transitions[50:], *transitions[10:50]]
    for slot in (0, 9, 10, 49, -1):
        assert torch.equal(buffer.actions[slot], ring[slot]["action"][0])
        assert torch.equal(buffer.states[FRONT][slot], ring[slot]["state"][FRONT][0])
        assert torch.equal(buffer.next_states[VECTOR][slot], ring[slot]["next_state"][VECTOR][0])
        assert buffer.rewards[slot] == np.float32(ring[slot]["reward"])
        assert bool(buffer.dones[slot]) == ring[slot]["done"]
        assert bool(buffer.truncateds[slot]) == ring[slot]["truncated"]
    assert buffer.actions[5:9].shape == (4, 3)
    assert buffer.states[WRIST][torch.tensor([3, 3])].shape == (2, *SHAPE)
    assert buffer.complementary_info_keys == ["discrete_penalty", "is_intervention"]
    assert buffer.complementary_info["discrete_penalty"][0] == 50
    with pytest.raises(IndexError):
        buffer.actions[50]


def test_tensors_without_a_batch_axis_and_other_dtypes_are_stored_as_lerobot_stores_them() -> None:
    buffer = make_buffer(5)
    buffer.add({VECTOR: torch.arange(3)}, torch.tensor(2.5, dtype=torch.float64), torch.tensor(1.5), None, True, False)
    batch = buffer.sample(4)
    assert torch.equal(batch["state"][VECTOR], torch.tensor([[0.0, 1.0, 2.0]]))
    assert torch.equal(batch["next_state"][VECTOR], batch["state"][VECTOR])
    assert batch["action"].tolist() == [2.5]
    assert batch["complementary_info"] is None


def test_a_budget_keeps_the_newest_rows_and_draws_only_them() -> None:
    transitions = list(play(4_000, length=50))
    buffer = fill(make_buffer(4_000, budget="20MiB", _tuning=None, lossy_8bit_images=False), transitions[:0])
    generator = np.random.default_rng(0)
    state = {VECTOR: torch.zeros(1, 30_000)}
    for i in range(800):
        following = {
            VECTOR: torch.from_numpy(generator.integers(0, 2**31, (1, 30_000)).astype(np.int32)).view(torch.float32)
        }
        buffer.add(state, torch.tensor([float(i)]), float(i), following, False, False)
        state = following
    assert 0 < len(buffer) < 800
    drawn = buffer.sample(500)["reward"]
    assert drawn.min() >= 800 - len(buffer)
    buffer.close()


# ---------------------------------------------------------------- images

WORDS = np.arange(768).reshape(3, 16, 16).astype(np.uint8)
EXACT = {
    "divided": (WORDS.astype(np.float32) / np.float32(255), ImageForm.DIVIDED),
    "multiplied": (WORDS.astype(np.float32) * (np.float32(1) / np.float32(255)), ImageForm.MULTIPLIED),
    "whole": (WORDS.astype(np.float32), ImageForm.WHOLE),
}


@pytest.mark.parametrize(("image", "form"), EXACT.values(), ids=EXACT)
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))],
)
def test_all_256_words_come_back_bit_for_bit(image: Any, form: ImageForm, device: str) -> None:
    encoded = ImageEncoder(image.shape, is_lossy=False).encode(image, "image")
    assert encoded.form is form
    assert not encoded.floats.any()
    into = torch.empty((1, *image.shape), device=device)
    decode(torch.from_numpy(encoded.words)[None].to(device), np.array([form], np.uint8), into)
    assert np.array_equal(into[0].cpu().numpy().view(np.uint32), image.view(np.uint32))


def _change_one_bit(image: Any) -> Any:
    changed = image.copy()
    changed[2, 15, 15] = np.nextafter(changed[2, 15, 15], np.float32(2))
    return changed


def _set_value(image: Any, value: float) -> Any:
    changed = image.copy()
    changed[1, 3, 4] = value
    return changed


DIVIDED = EXACT["divided"][0]
INEXACT = {
    "one bit": _change_one_bit(DIVIDED),
    "NaN": _set_value(DIVIDED, np.nan),
    "infinity": _set_value(DIVIDED, -np.inf),
    "minus zero": _set_value(DIVIDED, -0.0),
    "negative": _set_value(DIVIDED, -1 / 255),
    "above": _set_value(DIVIDED, 256 / 255),
    "huge": _set_value(DIVIDED, 3e38),
}


@pytest.mark.parametrize("image", INEXACT.values(), ids=INEXACT)
@pytest.mark.filterwarnings("error")
def test_an_image_with_one_other_value_stays_float32(image: Any) -> None:
    buffer = make_buffer(4)
    for given in (DIVIDED, image, DIVIDED):
        tensor = torch.from_numpy(given)
        buffer.add({FRONT: tensor[None]}, torch.zeros(1, 1), 0.0, {FRONT: tensor[None]}, False, False)
    for slot, given in enumerate((DIVIDED, image, DIVIDED)):
        for stored in (buffer.states, buffer.next_states):
            assert np.array_equal(stored[FRONT][slot].numpy().view(np.uint32), given.view(np.uint32))


def test_batches_of_mixed_forms_are_exact() -> None:
    """Frames of a dataset have 8 bits, and frames of interventions were resized. One buffer has both."""
    transitions = list(itertools.chain(play(20), play(20, 1, is_resized=True), play(20, 2)))
    for i, image in enumerate(EXACT.values()):
        transitions[i]["state"][WRIST] = torch.from_numpy(image[0])[None]
    buffer = fill(make_buffer(60, budget=None), transitions)
    torch.manual_seed(0)
    slots = torch.randint(0, 60, (60,)).tolist()
    torch.manual_seed(0)
    batch = buffer.sample(60)
    for row, slot in enumerate(slots):
        require_row(batch, row, transitions[slot])
    buffer.close()


@pytest.mark.parametrize(("divisor", "ratio"), [(255.0, 7.5), (254.0, 1.9)], ids=["words", "floats"])
def test_each_image_takes_its_words_once_and_the_unused_form_nothing(divisor: float, ratio: float) -> None:
    """Random images cannot be compressed. Divided by 254, they are stored as float32."""
    generator = np.random.default_rng(0)
    shape = (1, 3, 64, 64)
    buffer = make_buffer(300, budget=None, _tuning=None)
    state = {FRONT: torch.zeros(shape)}
    for _ in range(300):
        words = torch.from_numpy(generator.integers(0, 256, shape).astype(np.uint8))
        following = {FRONT: words.float() / divisor}
        buffer.add(state, torch.zeros(1, 1), 0.0, following, False, False)
        state = following
    buffer.memory.store.wait_idle()
    plain = 2 * 4 * int(np.prod(shape))
    assert plain / (buffer.report().total_bytes / 300) > ratio
    buffer.close()


def test_a_tensor_that_is_overwritten_after_add_changes_nothing() -> None:
    state = observe(np.random.default_rng(0))
    wanted = {key: tensor.clone() for key, tensor in state.items()}
    buffer = make_buffer(4)
    buffer.add(state, torch.zeros(1, 1), 0.0, state, False, False)
    for tensor in state.values():
        tensor.zero_()
    buffer.add(state, torch.zeros(1, 1), 0.0, state, False, False)
    for key in KEYS:
        assert torch.equal(buffer.states[key][0], wanted[key][0])
        assert not buffer.states[key][1].any()


def test_lossy_8bit_images_rounds_and_only_when_asked() -> None:
    transitions = list(play(10, is_resized=True))
    lossy = fill(make_buffer(lossy_8bit_images=True), transitions)
    exact = fill(make_buffer(), transitions)
    image = transitions[3]["state"][FRONT][0]
    assert torch.equal(exact.states[FRONT][3], image)
    assert torch.equal(lossy.states[FRONT][3], (image * 255).round() / 255)
    assert torch.equal(lossy.states[VECTOR][3], transitions[3]["state"][VECTOR][0])
    transitions[0]["state"][FRONT][0, 0, 0, 0] = 1.5
    with pytest.raises(ArgumentError, match=r"\[0, 1\].*lossy_8bit_images=False"):
        lossy.add(**transitions[0])


def test_augmentation_is_applied_to_all_images_at_once() -> None:
    shapes: list[Any] = []

    def augment(images: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(images.shape))
        return images + torch.arange(len(images))[:, None, None, None]

    transitions = list(play(9))
    buffer = fill(make_buffer(use_drq=True, image_augmentation_function=augment), transitions)
    torch.manual_seed(3)
    slots = torch.randint(0, 9, (4,)).tolist()
    torch.manual_seed(3)
    batch = buffer.sample(4)
    assert shapes == [(16, *SHAPE)]
    order = itertools.product((FRONT, WRIST), ("state", "next_state"), range(4))
    for number, (key, part, row) in enumerate(order):
        assert torch.equal(batch[part][key][row], transitions[slots[row]][part][key][0] + number)  # type: ignore[literal-required]
        assert torch.equal(batch["state"][VECTOR][row], transitions[slots[row]]["state"][VECTOR][0])


# ---------------------------------------------------------------- iterators


@pytest.mark.parametrize("async_prefetch", [True, False])
def test_an_iterator_draws_the_batches_of_sample(async_prefetch: bool) -> None:
    buffer = fill(make_buffer(), list(play(40)))
    torch.manual_seed(1)
    wanted = [buffer.sample(8) for _ in range(6)]
    torch.manual_seed(1)
    iterator = buffer.get_iterator(8, async_prefetch=async_prefetch, queue_size=3)
    for batch in wanted:
        require_same(next(iterator), batch)


def test_an_iterator_raises_the_error_of_its_thread() -> None:
    buffer = fill(make_buffer(), list(play(10)))
    iterator = buffer.get_iterator(4)
    next(iterator)
    buffer.close()
    with pytest.raises(ClosedError):
        list(itertools.islice(iterator, 9))


# ---------------------------------------------------------------- checkpoints


def test_a_loaded_buffer_draws_the_next_batches(tmp_path: Path) -> None:
    transitions = [*play(60), *play(30, 1, is_resized=True)]
    buffer = fill(make_buffer(80, budget=None), transitions)
    torch.manual_seed(5)
    buffer.sample(16)
    buffer.save(tmp_path / "run").result()
    wanted = [buffer.sample(16) for _ in range(3)]
    loaded = ReplayBuffer.load(tmp_path / "run", "cpu")
    assert (len(loaded), loaded.capacity, loaded.state_keys, loaded.use_drq) == (80, 80, KEYS, False)
    for batch in wanted:
        require_same(loaded.sample(16), batch)
    for transition in play(20, 2):
        buffer.add(**transition)
        loaded.add(**transition)
    torch.manual_seed(6)
    later = buffer.sample(64)
    torch.manual_seed(6)
    require_same(loaded.sample(64), later)
    buffer.close()
    loaded.save(tmp_path / "run").result()
    loaded.close()


def draw_mixed(iterators: list[Iterator[Any]], count: int) -> list[Any]:
    """Return the next batches of iterators in turn. Other code draws from torch's generator in between."""
    batches: list[Any] = []
    for _ in range(count):
        batches += [next(iterator) for iterator in iterators]
        torch.rand(3)
    return batches


@pytest.mark.parametrize("use_drq", [False, True])
@pytest.mark.parametrize("rows_after_draw", [0, 30])
@pytest.mark.parametrize("queue_size", [0, 1, 2, 5])
def test_a_loaded_buffer_continues_an_iterator(
    queue_size: int, rows_after_draw: int, use_drq: bool, tmp_path: Path
) -> None:
    """Rows that were evicted after they were drawn are in the batches, too."""

    def augment(images: torch.Tensor) -> torch.Tensor:
        return images + torch.rand(1)

    settings: dict[str, Any] = {"image_augmentation_function": augment}
    ahead: dict[str, Any] = {"queue_size": queue_size} if queue_size else {"async_prefetch": False}
    buffer = fill(make_buffer(80, use_drq=use_drq, **settings), [*play(60), *play(40, 1, is_resized=True)])
    torch.manual_seed(5)
    iterator = buffer.get_iterator(16, **ahead)
    draw_mixed([iterator], 3)
    fill(buffer, list(play(rows_after_draw, 2)))
    buffer.save(tmp_path / "run").result()
    wanted = draw_mixed([iterator], 7)
    for _ in range(2):
        loaded = ReplayBuffer.load(tmp_path / "run", "cpu", **settings)
        fill(loaded, list(play(100, 3)))  # Evicts everything that was loaded.
        loaded.close()
    loaded = ReplayBuffer.load(tmp_path / "run", "cpu", **settings)
    for batch, expected in zip(draw_mixed([loaded.get_iterator(16, **ahead)], 7), wanted, strict=True):
        require_same(batch, expected)
    loaded.close()
    buffer.close()


def test_batches_that_were_restored_are_saved_again(tmp_path: Path) -> None:
    """They are saved before an iterator continues them, and again after it returned one of them."""
    buffer = fill(make_buffer(40), list(play(50)))
    torch.manual_seed(1)
    iterator = buffer.get_iterator(8, queue_size=4)
    next(iterator)
    wanted = draw_mixed([iterator], 6)
    buffer.close()

    buffer = fill(make_buffer(40), list(play(50)))
    torch.manual_seed(1)
    iterator = buffer.get_iterator(8, queue_size=4)
    next(iterator)
    buffer.save(tmp_path).result()
    buffer.close()
    buffer = ReplayBuffer.load(tmp_path, "cpu")
    generator = torch.get_rng_state()
    fill(buffer, list(play(35, 1)))
    buffer.save(tmp_path).result()
    buffer.close()
    buffer = ReplayBuffer.load(tmp_path, "cpu")
    assert torch.equal(torch.get_rng_state(), generator)
    iterator = buffer.get_iterator(8, queue_size=4)
    require_same(draw_mixed([iterator], 1)[0], wanted[0])
    buffer.save(tmp_path).result()
    buffer.close()
    buffer = ReplayBuffer.load(tmp_path, "cpu")
    # The two batches that are drawn now see the rows that were added above.
    for batch, expected in zip(draw_mixed([buffer.get_iterator(8, queue_size=4)], 3), wanted[1:4], strict=True):
        require_same(batch, expected)
    buffer.close()


def test_each_iterator_continues_the_one_of_its_batch_size(tmp_path: Path) -> None:
    buffer = fill(make_buffer(), list(play(40)))
    iterators = [buffer.get_iterator(size) for size in (4, 8, 4)]
    dropped = buffer.get_iterator(8)
    draw_mixed([*iterators, dropped], 2)
    del dropped
    buffer.save(tmp_path).result()
    wanted = draw_mixed(iterators, 4)
    loaded = ReplayBuffer.load(tmp_path, "cpu")
    resumed = [loaded.get_iterator(size) for size in (4, 8, 4)]
    for batch, expected in zip(draw_mixed(resumed, 4), wanted, strict=True):
        require_same(batch, expected)
    loaded.close()
    buffer.close()


def test_a_smaller_buffer_draws_new_batches(tmp_path: Path) -> None:
    """Rows of the batches that were drawn ahead are not loaded."""
    buffer = fill(make_buffer(60), list(play(60)))
    iterator = buffer.get_iterator(32)
    next(iterator)
    buffer.save(tmp_path).result()
    buffer.close()
    loaded = ReplayBuffer.load(tmp_path, "cpu", capacity=10)
    batch = next(loaded.get_iterator(32))
    assert len(batch["reward"]) == len(loaded) == 10
    loaded.close()


def test_load_keeps_the_generator_if_asked(tmp_path: Path) -> None:
    fill(make_buffer(), list(play(9))).save(tmp_path).result()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    ReplayBuffer.load(tmp_path, "cpu", restore_generator=False).close()
    assert torch.equal(torch.get_rng_state(), before)


def test_another_memorys_checkpoint_is_refused(tmp_path: Path) -> None:
    buffer = fill(make_buffer(), list(play(9)))
    buffer.memory.save(tmp_path).result()
    with pytest.raises(CheckpointError, match="not one of a LeRobot buffer"):
        ReplayBuffer.load(tmp_path, "cpu")


def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    buffer = fill(make_buffer(), list(play(9)))
    buffer.memory.save(tmp_path, attach={"lerobot/layout.json": b'{"format": 2}'}).result()
    with pytest.raises(CheckpointError, match="has format 2, but this version reads 1"):
        ReplayBuffer.load(tmp_path, "cpu")


# ---------------------------------------------------------------- datasets


class Frames(list[dict[str, Any]]):
    """A dataset: frames, and how often each was decoded."""

    def __init__(self, frames: list[dict[str, Any]]) -> None:
        super().__init__(frames)
        self.decoded = [0] * len(frames)

    def __getitem__(self, index: Any) -> Any:
        self.decoded[index] += 1
        return super().__getitem__(index)


def record(lengths: list[int], *, done: list[bool] | None) -> Frames:
    """Record episodes. `done` says which of them ended by success, or None for a dataset without next.done."""
    generator = np.random.default_rng(0)
    frames: list[dict[str, Any]] = []
    for episode, length in enumerate(lengths):
        for i in range(length):
            frame = {key: tensor[0] for key, tensor in observe(generator).items()}
            frame |= {"action": torch.full((2,), float(i)), "next.reward": torch.tensor(1.0 * len(frames))}
            frame |= {"episode_index": torch.tensor(episode), "complementary_info.penalty": torch.tensor([0.5])}
            if done is not None:
                frame["next.done"] = torch.tensor(i == length - 1 and done[episode])
            frames.append(frame)
    return Frames(frames)


SETTINGS: dict[str, Any] = {"device": "cpu", "state_keys": KEYS, "use_drq": False}


def test_a_dataset_becomes_transitions_and_each_frame_is_decoded_once() -> None:
    frames = record([4, 3, 2], done=[True, False, True])
    buffer = ReplayBuffer.from_lerobot_dataset(frames, **SETTINGS)
    assert frames.decoded == [1] * 9
    assert (len(buffer), buffer.capacity) == (9, 9)
    assert buffer.rewards[:].tolist() == list(range(9))
    assert buffer.dones[:].nonzero().flatten().tolist() == [3, 8]
    assert buffer.truncateds[:].nonzero().flatten().tolist() == [6]
    follow = [1, 2, 3, 3, 5, 6, 6, 8, 8]
    for slot, after in enumerate(follow):
        assert torch.equal(buffer.next_states[FRONT][slot], list.__getitem__(frames, after)[FRONT])
    assert buffer.complementary_info["penalty"][:].tolist() == [0.5] * 9


def test_frames_without_a_next_state_can_be_left_out() -> None:
    buffer = ReplayBuffer.from_lerobot_dataset(record([4, 3], done=[True, False]), drop_unfinished=True, **SETTINGS)
    assert buffer.rewards[:].tolist() == [0, 1, 2, 3, 4, 5]


def test_without_next_done_episodes_end_with_their_last_frame() -> None:
    buffer = ReplayBuffer.from_lerobot_dataset(record([2, 3], done=None), capacity=9, **SETTINGS)
    assert buffer.dones[:].tolist() == [False, True, False, False, True]
    assert buffer.capacity == 9


WRONG_DATASETS: dict[str, tuple[dict[str, Any], str]] = {
    "capacity": ({"capacity": 3}, "capacity of the ReplayBuffer must be greater than or equal"),
    "no keys": ({"state_keys": None}, "State keys must be provided"),
    "unknown key": ({"state_keys": ["observation.images.top"]}, r"has no \['observation.images.top'\]"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_DATASETS.values(), ids=WRONG_DATASETS)
def test_a_wrong_dataset_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ReplayBuffer.from_lerobot_dataset(record([5], done=[True]), **{**SETTINGS, **wrong})


# ---------------------------------------------------------------- wrong use


def _remove_key(transition: Transition, part: str, key: str) -> Transition:
    return {**transition, part: {k: v for k, v in transition[part].items() if k != key}}


def test_wrong_transitions_are_refused_and_nothing_is_written() -> None:
    buffer = fill(make_buffer(), list(play(5)))
    good = next(iter(play(1)))
    flat = {**good["state"], VECTOR: torch.zeros(1, 6)}
    wrong: list[tuple[Transition, str]] = [
        (_remove_key(good, "state", WRIST), r"state has the keys .* lacks \['observation.images.wrist'\]"),
        (_remove_key(good, "next_state", VECTOR), r"next_state has the keys .* lacks \['observation.state'\]"),
        (
            _remove_key(good, "complementary_info", "is_intervention"),
            r"complementary_info .* lacks \['is_intervention'\]",
        ),
        ({**good, "complementary_info": None}, "complementary_info is None. Pass a dict with the keys"),
        ({**good, "state": flat}, r"state\['observation.state'\] has shape \(1, 6\).* Pass a tensor of shape \(5,\)"),
        ({**good, "action": torch.zeros(1, 9)}, r"action has shape \(1, 9\)"),
        ({**good, "next_state": None}, "next_state is None, but done is False"),
        ({**good, "complementary_info": {"discrete_penalty": "x", "is_intervention": 1}}, "is a str. Pass a tensor"),
    ]
    for transition, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            buffer.add(**transition)
    assert len(buffer) == 5
    buffer.add(**{**good, "complementary_info": {**good["complementary_info"], "further": 1}})
    assert len(buffer) == 6


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Capacity must be greater than 0."):
        ReplayBuffer(0, "cpu")
    with pytest.raises(ArgumentError, match="storage_device='cpu'"):
        ReplayBuffer(5, "cpu", storage_device="cuda:0")
    with pytest.raises(ArgumentError, match="not a device of torch"):
        ReplayBuffer(5, "gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="Pass device='cpu'"):
            ReplayBuffer(5)


def test_use_of_an_empty_or_closed_buffer_is_refused() -> None:
    buffer = make_buffer()
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="Cannot sample from an empty buffer"):
        buffer.sample(1)
    with pytest.raises(RuntimeError, match="Cannot sample from an empty buffer"):
        next(buffer.get_iterator(1))
    with pytest.raises(ArgumentError, match="empty"):
        buffer.save("anywhere")
    with pytest.raises(ArgumentError, match="Cannot convert to a dataset"):
        buffer.to_lerobot_dataset("someone/something")
    fill(buffer, list(play(3)))
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.sample(1)
    with pytest.raises(ClosedError):
        buffer.add(**next(iter(play(1))))


class WrittenDataset:
    """A stand-in for LeRobotDataset that keeps the frames of each episode."""

    def __init__(self, **settings: Any) -> None:
        self.features = settings["features"]
        self.episodes: list[list[dict[str, Any]]] = []
        self.frames: list[dict[str, Any]] = []

    @classmethod
    def create(cls, **settings: Any) -> WrittenDataset:
        return cls(**settings)

    def add_frame(self, frame: dict[str, Any]) -> None:
        assert frame.keys() - {"task"} == self.features.keys()
        self.frames.append(frame)

    def save_episode(self) -> None:
        self.episodes.append(self.frames)
        self.frames = []

    def stop_image_writer(self) -> None:
        pass

    def finalize(self) -> None:
        assert not self.frames


@pytest.mark.parametrize("split_segments", [False, True])
def test_a_dataset_has_the_transitions_and_ends_episodes(split_segments: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `split_segments`, an episode also ends before the last row, which does not continue the previous one."""
    for name in ("lerobot", "lerobot.datasets", "lerobot.datasets.lerobot_dataset"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(
        sys.modules["lerobot.datasets.lerobot_dataset"], "LeRobotDataset", WrittenDataset, raising=False
    )
    transitions = [*play(10), next(play(1, seed=1))]
    dataset = fill(make_buffer(), transitions).to_lerobot_dataset("someone/something", split_segments=split_segments)
    assert [len(episode) for episode in dataset.episodes] == ([7, 3, 1] if split_segments else [7, 4])
    frames = [frame for episode in dataset.episodes for frame in episode]
    for frame, wanted in zip(frames, transitions, strict=True):
        assert torch.equal(frame[VECTOR], wanted["state"][VECTOR][0])
        assert torch.equal(frame["action"], wanted["action"][0])
        assert frame["next.done"].item() == wanted["done"]
        penalty = frame["complementary_info.discrete_penalty"]
        assert torch.equal(penalty, wanted["complementary_info"]["discrete_penalty"])


# ---------------------------------------------------------------- LeRobot's learner


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for `lerobot.rl.learner`, whose functions make buffers as LeRobot's do."""
    module = ModuleType("lerobot.rl.learner")

    def initialize_replay_buffer(cfg: Any, device: Any, storage_device: Any) -> Any:
        assert not cfg.resume, "the learner would open a LeRobotDataset"
        return module.ReplayBuffer(cfg.policy.online_buffer_capacity, device, KEYS, None, False, storage_device, True)

    def initialize_offline_replay_buffer(cfg: Any, device: Any, storage_device: Any) -> Any:
        assert not cfg.resume, "the learner would open a LeRobotDataset"
        frames = record([3, 3], done=[True, True])
        capacity = cfg.policy.offline_buffer_capacity
        return module.ReplayBuffer.from_lerobot_dataset(
            frames, device, KEYS, capacity, use_drq=False, optimize_memory=True
        )

    module.initialize_replay_buffer = initialize_replay_buffer  # type: ignore[attr-defined]
    module.initialize_offline_replay_buffer = initialize_offline_replay_buffer  # type: ignore[attr-defined]
    for name in ("lerobot", "lerobot.rl"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lerobot.rl.learner", module)
    return module


def test_a_learner_resumes_from_checkpoints(learner: Any, tmp_path: Path) -> None:
    policy = SimpleNamespace(online_buffer_capacity=100, offline_buffer_capacity=20)
    cfg = SimpleNamespace(output_dir=tmp_path, resume=False, policy=policy)
    install(budget=None)
    install(budget=None)  # The second call changes nothing.
    online = learner.initialize_replay_buffer(cfg, "cpu", "cpu")
    offline = learner.initialize_offline_replay_buffer(cfg, "cpu", "cpu")
    assert isinstance(online, ReplayBuffer)
    for transition in play(12):
        online.add(**transition)
    for step in range(2):
        for buffer, name in ((online, "dataset"), (offline, "dataset_offline")):
            assert buffer.to_lerobot_dataset("name", fps=10, root=str(tmp_path / name)) is None
        online.add(**list(play(13 + step))[-1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["holdall"]
    cfg.resume = True
    resumed = learner.initialize_replay_buffer(cfg, "cpu", "cpu")
    resumed_offline = learner.initialize_offline_replay_buffer(cfg, "cpu", "cpu")
    assert (len(resumed), resumed.capacity, resumed.optimize_memory) == (13, 100, True)
    assert torch.equal(resumed.actions[:], online.actions[:13])
    assert (len(resumed_offline), resumed_offline.capacity) == (6, 20)
    for buffer in (online, offline, resumed, resumed_offline):
        buffer.close()


@pytest.mark.parametrize("is_cut_between", [False, True])
def test_both_buffers_of_a_learner_resume_as_they_were_at_one_moment(
    learner: Any, tmp_path: Path, is_cut_between: bool
) -> None:
    """If a run is killed between the checkpoints of the two buffers, both resume from the ones before."""
    policy = SimpleNamespace(online_buffer_capacity=30, offline_buffer_capacity=20)
    cfg = SimpleNamespace(output_dir=tmp_path, resume=False, policy=policy)
    install(budget=None)

    def start() -> tuple[list[Any], list[Any]]:
        online = learner.initialize_replay_buffer(cfg, "cpu", "cpu")
        offline = learner.initialize_offline_replay_buffer(cfg, "cpu", "cpu")
        return [online, offline], [buffer.get_iterator(8) for buffer in (online, offline)]

    def learn(buffers: list[Any], iterators: list[Any], seed: int) -> list[Any]:
        for buffer in buffers:
            for transition in play(12, seed):
                info = {"penalty": transition["complementary_info"]["discrete_penalty"]}
                buffer.add(**{**transition, "action": transition["action"][:, :2], "complementary_info": info})
        return draw_mixed(iterators, 5)

    def save(buffers: list[Any]) -> None:
        for buffer, name in zip(buffers, ("dataset", "dataset_offline"), strict=True):
            assert buffer.to_lerobot_dataset("name", fps=10, root=str(tmp_path / name)) is None

    torch.manual_seed(2)
    buffers, iterators = start()
    learn(buffers, iterators, 1)
    save(buffers)
    learn(buffers, iterators, 2)
    save(buffers)
    wanted = learn(buffers, iterators, 3)
    rows = [len(buffer) for buffer in buffers]
    if is_cut_between:
        buffers[1].save(tmp_path / "holdall" / "dataset_offline").result()
    for buffer in buffers:
        buffer.close()
    cfg.resume = True
    for _ in range(2):
        buffers, iterators = start()
        for batch, expected in zip(learn(buffers, iterators, 3), wanted, strict=True):
            require_same(batch, expected)
        assert [len(buffer) for buffer in buffers] == rows
        if is_cut_between:
            buffers[1].save(tmp_path / "holdall" / "dataset_offline").result()
        for buffer in buffers:
            buffer.close()


def test_a_run_without_checkpoints_of_holdall_resumes_as_lerobot_does(learner: Any, tmp_path: Path) -> None:
    cfg = SimpleNamespace(output_dir=tmp_path, resume=True, policy=SimpleNamespace(online_buffer_capacity=9))
    install()
    with pytest.raises(AssertionError, match="would open a LeRobotDataset"):
        learner.initialize_replay_buffer(cfg, "cpu", "cpu")


def test_the_module_runs_lerobots_command(tmp_path: Path) -> None:
    """`python -m holdall.lerobot` installs the buffers, and then calls LeRobot's own function."""
    folder = tmp_path / "lerobot" / "rl"
    folder.mkdir(parents=True)
    (folder / "learner.py").write_text(
        "import sys\n"
        "ReplayBuffer = initialize_replay_buffer = initialize_offline_replay_buffer = None\n"
        "def train_cli():\n    print(ReplayBuffer.__mro__[2], *sys.argv[1:])\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "holdall.lerobot", "--config_path", "train.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "<class 'holdall.lerobot.replay_buffer.ReplayBuffer'> --config_path train.json\n"


# ---------------------------------------------------------------- the guide

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "lerobot.md"


def test_the_lines_of_the_guide_start_the_learner_with_holdalls_buffers(learner: Any, tmp_path: Path) -> None:
    command, program = re.findall(r"^```text\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert command.startswith("python -m holdall.lerobot ")  # test_the_module_runs_lerobots_command runs this one.
    assert "/data/replay" in program
    policy = SimpleNamespace(online_buffer_capacity=100)
    cfg = SimpleNamespace(output_dir=tmp_path, resume=False, policy=policy)
    drawn: list[Any] = []

    def train_cli() -> None:
        buffer = learner.initialize_replay_buffer(cfg, "cpu", "cpu")
        for transition in play(12):
            buffer.add(**transition)
        drawn.append((buffer.memory.report().budget_bytes, buffer.sample(4)))
        buffer.close()

    learner.train_cli = train_cli
    sys.modules["lerobot.rl"].learner = learner  # type: ignore[attr-defined]  # It is a stand-in.
    exec(program.replace("/data/replay", str(tmp_path / "spill")), {})
    ((budget_bytes, batch),) = drawn
    assert budget_bytes == 8 << 30
    assert len(batch["reward"]) == 4
