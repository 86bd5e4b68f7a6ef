"""Forks: memories belong to the process that made them. They are closed in a child, and the parent notices nothing."""

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
import functools, json, os, signal, sys, threading, traceback
import numpy as np
from gymnasium import spaces
import holdall
from holdall.store.tuning import Tuning

folder, FRAME = sys.argv[1], (4, 24, 24)
landscape = np.random.default_rng(0).integers(0, 256, (24, 24), np.uint8)


@functools.lru_cache(None)
def frames(tick):
    return np.stack([np.roll(landscape, t, axis=1) ^ np.uint8(t * 7 % 256) for t in range(tick, tick + 4)])[None]


def add(memory, tick):
    flag = np.zeros(1, bool)
    number = np.full(1, tick, np.float32)
    memory.add(frames(tick), np.zeros(1, np.int64), number, frames(tick + 1), flag, flag)


def count_wrong_rows(memory):
    batch = memory.gather(np.arange(memory.first_id, memory.next_id))
    rows = zip(batch.ids.tolist(), batch.obs, batch.next_obs, batch.reward, strict=True)
    return sum(
        not ((obs == frames(i)[0]).all() and (following == frames(i + 1)[0]).all() and reward == i)
        for i, obs, following, reward in rows
    )


def run_in_child(act):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # A child that waits for ever is killed, and its answer is missing.
        try:
            answer = act()
        except BaseException:
            answer = traceback.format_exc()
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(answer) if answer else f"died with status {status}"


def make_memory(**settings):
    space = spaces.Box(0, 255, FRAME, np.uint8)
    tuning = Tuning(block_bytes=60_000)  # Blocks are filled, compressed and spilled all the time.
    return holdall.ReplayMemory(space, spaces.Discrete(2), 4000, seed=3, _tuning=tuning, **settings)


def name_error(act):
    try:
        act()
    except holdall.HoldallError as error:
        return [type(error).__name__, "forked" in str(error)]
    return ["no error", False]
"""


def run(script: str, folder: Path, *arguments: str) -> Any:
    """Run a script in another process. Return the value of its last line."""
    command = [sys.executable, "-c", SETUP + script, str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


CALLS = """
memory = make_memory(budget=None)
rollout = holdall.RolloutMemory(spaces.Box(0, 1, (2,)), spaces.Discrete(2), 64, seed=3)
for tick in range(200):
    add(memory, tick)
one, flag = np.ones(1, np.float32), np.zeros(1, bool)
for _ in range(64):
    rollout.add(np.zeros((1, 2), np.float32), np.zeros(1, np.int64), one, flag, flag, one, one)
rollout.finish(one)
loader = memory.loader(8)
next(loader)


def draw():
    return memory.sample(32).ids.tolist() + next(rollout.minibatches(32)).ids.tolist()


def call_everything():
    calls = {
        "add": lambda: add(memory, 200),
        "sample": lambda: memory.sample(4),
        "gather": lambda: memory.gather(np.arange(3)),
        "len": lambda: len(memory),
        "report": lambda: memory.report(),
        "save": lambda: memory.save(folder + "/child"),
        "loader": lambda: next(loader),
        "new loader": lambda: next(memory.loader(8)),
        "rollout add": lambda: rollout.add(None, None, None, None, None, None, None),
        "rollout minibatches": lambda: next(rollout.minibatches(4)),
        "rollout reset": lambda: rollout.reset(),
        "rollout report": lambda: rollout.report(),
    }
    answers = {name: name_error(call) for name, call in calls.items()}
    memory.close()
    rollout.close()
    return answers


draws = [draw()]
answers = run_in_child(call_everything) if folder != "none" else {}
draws += [draw(), draw()]
print(json.dumps({"draws": draws, "answers": answers}))
"""


def test_every_call_in_a_child_is_refused_and_the_parent_draws_as_without_a_child(tmp_path: Path) -> None:
    """The errors say that the memory was made before the fork."""
    with_child = run(CALLS, tmp_path)
    assert set(map(tuple, with_child["answers"].values())) == {("ClosedError", True)}, with_child["answers"]
    assert with_child["draws"] == run(CALLS, Path("none"))["draws"]


BUSY = """
memory = make_memory(budget=2_000_000, spill_dir=folder + "/spill")
for tick in range(300):
    add(memory, tick)
is_ended, ticks = threading.Event(), [300]


def keep_adding():
    while not is_ended.is_set():
        add(memory, ticks[0])
        ticks[0] += 1


def keep_drawing():
    while not is_ended.is_set():
        memory.sample(8)


threads = [threading.Thread(target=act) for act in (keep_adding, keep_drawing)]
for thread in threads:
    thread.start()


def use_own_memory():
    with make_memory(budget=2_000_000, spill_dir=folder + "/spill") as own:
        for tick in range(400):
            add(own, tick)
        own.store.wait_idle()
        wrong = count_wrong_rows(own)
        failure = own.report().failure
    memory.close()
    return [wrong, failure, name_error(lambda: memory.sample(1))[0]]


answers = [run_in_child(use_own_memory) for _ in range(int(sys.argv[2]))]
is_ended.set()
for thread in threads:
    thread.join()
memory.store.wait_idle()
wrong = count_wrong_rows(memory)
memory.close()
print(json.dumps({"children": answers, "wrong": wrong, "left": os.listdir(folder + "/spill")}))
"""


@pytest.mark.parametrize("forks", [3, pytest.param(60, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])])
def test_a_child_of_a_busy_memory_can_use_memories_of_its_own(forks: int, tmp_path: Path) -> None:
    """Forked while threads add, draw, compress and spill: the child waits for nothing, and the parent loses nothing."""
    result = run(BUSY, tmp_path, str(forks))
    assert result == {"children": [[0, "", "ClosedError"]] * forks, "wrong": 0, "left": []}


LOCKED = """
def is_refused():
    other = make_memory()
    add(other, 0)
    try:
        other.save(folder + "/run").result(20)
    except holdall.FencedError:
        return True
    finally:
        other.close()
    return False


memory = make_memory()
add(memory, 0)
memory.save(folder + "/run").result(20)
reading, writing = os.pipe()
child = os.fork()
if child == 0:  # This child lives on, with a copy of every file that its parent had open.
    signal.alarm(60)
    os.read(reading, 1)
    os._exit(0)
run_in_child(lambda: memory.close())
answers = [is_refused()]
memory.close()
answers.append(is_refused())
os.write(writing, b".")
os.waitpid(child, 0)
print(json.dumps(answers))
"""


def test_the_lock_of_a_checkpoint_folder_belongs_to_the_parent_until_it_closes(tmp_path: Path) -> None:
    """Children have copies of the lock's file. They neither release the lock nor keep it."""
    assert run(LOCKED, tmp_path) == [True, False]


ORPHANED = (
    LOCKED.partition("memory = make_memory()")[0]
    + """
reading, writing = os.pipe()
ready, saved = os.pipe()
trainer = os.fork()
if trainer == 0:
    signal.alarm(60)
    memory = make_memory()
    add(memory, 0)
    memory.save(folder + "/run").result(20)
    if os.fork() == 0:  # An environment, which lives on when its trainer is killed.
        signal.alarm(60)
        os.write(saved, b".")
        os.read(reading, 1)
        os._exit(0)
    signal.pause()
os.read(ready, 1)
answers = [is_refused()]
os.kill(trainer, signal.SIGKILL)
os.waitpid(trainer, 0)
answers.append(is_refused())
os.write(writing, b".")
print(json.dumps(answers))
"""
)


def test_a_checkpoint_folder_is_free_once_its_writer_was_killed_even_if_children_live(tmp_path: Path) -> None:
    assert run(ORPHANED, tmp_path) == [True, False]
