"""Forks: a child reads and adds like its parent, draws other batches, and leaves to the parent what is the parent's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

SETUP = """
import functools, json, os, signal, sys, threading
import numpy as np
from gymnasium import spaces
import holdall
from holdall.storage import segment

segment.SEGMENT_BYTES = 60_000  # blocks fill, are sealed and spilled all the time
folder, FRAME = sys.argv[1], (4, 24, 24)


landscape = np.random.default_rng(0).integers(0, 256, (24, 24), np.uint8)


@functools.lru_cache(None)
def frames(tick):
    return np.stack([np.roll(landscape, t, axis=1) ^ np.uint8(t * 7 % 256) for t in range(tick, tick + 4)])[None]


def add(memory, tick):
    flag = np.zeros(1, bool)
    number = np.full(1, tick, np.float32)
    memory.add(frames(tick), np.zeros(1, np.int64), number, frames(tick + 1), flag, flag)


def wrong_rows(memory, ids=None):
    batch = memory.sample(32) if ids is None else memory.gather(ids)
    rows = zip(batch.ids.tolist(), batch.obs, batch.next_obs, batch.reward, strict=True)
    return sum(
        not ((obs == frames(i)[0]).all() and (following == frames(i + 1)[0]).all() and reward == i)
        for i, obs, following, reward in rows
    )


def in_child(act):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for ever is killed, and its answer is missing
        try:
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer or b'"died"')


def made(**settings):
    space = spaces.Box(0, 255, FRAME, np.uint8)
    return holdall.ReplayMemory(space, spaces.Discrete(2), 4000, seed=3, **settings)
"""


def run(script: str, folder: Path, *arguments: str) -> Any:
    command = [sys.executable, "-c", SETUP + script, str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


DRAWS = """
memory, rollout = made(budget=None), holdall.RolloutMemory(spaces.Box(0, 1, (2,)), spaces.Discrete(2), 64, seed=3)
for tick in range(200):
    add(memory, tick)
one, flag = np.ones(1, np.float32), np.zeros(1, bool)
for _ in range(64):
    rollout.add(np.zeros((1, 2), np.float32), np.zeros(1, np.int64), one, flag, flag, one, one)
rollout.finish(one)


def draw():
    return memory.sample(32).ids.tolist() + next(rollout.minibatches(32)).ids.tolist()


def childs_draws():
    return [draw(), draw(), in_child(draw)]


forks = int(sys.argv[1] != "none")
first = draw()
children = [in_child(childs_draws) for _ in range(3 * forks)]
print(json.dumps({"parent": [first, draw(), draw()], "children": children}))
"""


def test_children_draw_other_batches_and_the_parent_goes_on_as_if_it_had_none() -> None:
    """No two draws are alike, of children or their children; and every run of the program makes the same ones."""
    told, again, alone = (run(DRAWS, Path(name)) for name in ("some", "some", "none"))
    assert told == again
    assert told["parent"] == alone["parent"]
    draws = [*told["parent"], *(draw for child in told["children"] for draw in child)]
    for part in (slice(0, 32), slice(32, 64)):
        assert len({tuple(draw[part]) for draw in draws}) == len(draws) == 12


BUSY = """
memory = made(budget=400_000, spill_dir=folder + "/spill")
for tick in range(300):
    add(memory, tick)
ended, ticks = threading.Event(), [300]


def go_on():
    while not ended.is_set():
        add(memory, ticks[0])
        ticks[0] += 1


def draw_on():
    while not ended.is_set():
        memory.sample(8)


threads = [threading.Thread(target=act) for act in (go_on, draw_on)]
for thread in threads:
    thread.start()


def use():
    wrong = wrong_rows(memory)
    first = memory.next_id
    for tick in range(first, first + 60):
        add(memory, tick)
    memory.drain()
    wrong += wrong_rows(memory) + wrong_rows(memory, np.arange(memory.first_id, memory.next_id))
    failure = memory.report().failure
    memory.close()
    return [wrong, failure]


answers = [in_child(use) for _ in range(int(sys.argv[2]))]
ended.set()
for thread in threads:
    thread.join()
memory.drain()
wrong = wrong_rows(memory, np.arange(memory.first_id, memory.next_id))
memory.close()
print(json.dumps({"children": answers, "wrong": wrong, "left": os.listdir(folder + "/spill")}))
"""


@pytest.mark.parametrize("forks", [3, pytest.param(60, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])])
def test_a_child_of_a_busy_memory_reads_adds_seals_and_spills(forks: int, tmp_path: Path) -> None:
    """Forked while threads add, draw, seal and spill: no lock stays held, no row is wrong, in the parent neither."""
    told = run(BUSY, tmp_path, str(forks))
    assert told == {"children": [[0, ""]] * forks, "wrong": 0, "left": []}


SAVING = """
memory = made(budget=None)
for tick in range(200):
    add(memory, tick)
memory.save_every(folder + "/run", 60.0)
memory.save(folder + "/run").result()
loader = memory.loader(8)
next(loader)


def refused(act):
    try:
        act()
    except holdall.HoldallError as error:
        return type(error).__name__
    return "nothing"


def use():
    answers = [refused(lambda: memory.save(folder + "/run").result(20)), refused(lambda: next(loader))]
    answers.append(memory.save(folder + "/own").result(20).number)
    with memory.loader(8) as own:
        answers.append(len(next(own)))
    memory.close()
    return answers


answers = [in_child(use)]
add(memory, 200)
memory.save(folder + "/run").result(20)
memory.close()
loaded = [holdall.ReplayMemory.load(folder + name) for name in ("/run", "/own")]
print(json.dumps({"child": answers, "held": [len(each) for each in loaded], "wrong": sum(map(wrong_rows, loaded))}))
"""


def test_a_childs_checkpoints_and_loaders_are_its_own(tmp_path: Path) -> None:
    """It does not write where its parent saves, nor wait for threads that it does not have."""
    told = run(SAVING, tmp_path)
    assert told == {"child": [["FencedError", "ClosedError", 1, 8]], "held": [201, 200], "wrong": 0}


LOCKED = """
def is_refused():
    other = made()
    add(other, 0)
    try:
        other.save(folder + "/run").result(20)
    except holdall.FencedError:
        return True
    finally:
        other.close()
    return False


memory = made()
add(memory, 0)
memory.save(folder + "/run").result(20)
reading, writing = os.pipe()
child = os.fork()
if child == 0:  # it lives on, with a copy of every file that its parent had open
    signal.alarm(60)
    os.read(reading, 1)
    os._exit(0)
in_child(lambda: memory.close())
told = [is_refused()]
(saver,) = memory._savers._savers.values()
in_child(lambda: saver._target.close())
told.append(is_refused())
memory.close()
told.append(is_refused())
os.write(writing, b".")
os.waitpid(child, 0)
print(json.dumps(told))
"""


def test_a_place_is_the_parents_until_it_closes_whatever_children_do(tmp_path: Path) -> None:
    """Children that were forked have its lock open, too: they neither give it back nor keep it."""
    assert run(LOCKED, tmp_path) == [True, True, False]


ORPHANED = (
    LOCKED.partition("memory = made()")[0]
    + """
reading, writing = os.pipe()
ready, saved = os.pipe()
trainer = os.fork()
if trainer == 0:
    signal.alarm(60)
    memory = made()
    add(memory, 0)
    memory.save(folder + "/run").result(20)
    if os.fork() == 0:  # an environment, which lives on when its trainer is killed
        signal.alarm(60)
        os.write(saved, b".")
        os.read(reading, 1)
        os._exit(0)
    signal.pause()
os.read(ready, 1)
told = [is_refused()]
os.kill(trainer, signal.SIGKILL)
os.waitpid(trainer, 0)
told.append(is_refused())
os.write(writing, b".")
print(json.dumps(told))
"""
)


def test_a_place_is_free_once_its_writer_was_killed_though_children_of_it_live(tmp_path: Path) -> None:
    assert run(ORPHANED, tmp_path) == [True, False]


LOADER = """
import torch
from torch.utils.data import DataLoader, IterableDataset

memory = made(budget=None)
for tick in range(200):
    add(memory, tick)


class Batches(IterableDataset):
    def __iter__(self):
        for _ in range(3):
            yield memory.sample(16).ids.tolist()


def epoch():
    return [list(batch) for batch in DataLoader(Batches(), None, num_workers=3, multiprocessing_context="fork")]


print(json.dumps([epoch(), epoch()]))
"""


def test_the_workers_of_a_data_loader_draw_different_batches(tmp_path: Path) -> None:
    """Also in the next epoch, whose workers are forked anew."""
    batches = [tuple(batch) for epoch in run(LOADER, tmp_path) for batch in epoch]
    assert len(set(batches)) == len(batches) == 18
