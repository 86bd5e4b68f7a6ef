"""What `holdall watch` must survive and find: `python benchmarks/watch/showings.py ends leaks [--json FILE]`.

    ends     starts and ends of real trainings under a watch: no crash, every exit code kept
    imports  scripts that only import, on a busy machine: no alarm
    clean    trainings that leak nothing: no alarm
    leaks    planted leaks of ten kinds: each is reported, with the command that finds its line
    spill    a memory that outgrows its control group at full speed, the first run cold: it finishes (needs root)

Every run is a line of .cache/benchmarks/watch_showings.jsonl as soon as it is done, and a run that has a line is not
repeated. So a showing continues where it was interrupted, or where --minutes ended it. The exit status is 1 if anything
was wrong in a run of a showing that is named.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, store
from shared.process import commit

HERE = Path(__file__).parent
LINES = HERE.parents[1] / ".cache" / "benchmarks" / "watch_showings.jsonl"
WATCH = [sys.executable, "-m", "holdall", "watch"]
TRAININGS = str(HERE / "trainings.py")
GROUPS = Path("/sys/fs/cgroup/memory")
MIB = 2**20
LIMIT = 400 * MIB
SPILLS = 20
Line = dict[str, Any]
"""One run: its showing, its number, the text `wrong`, which is empty if nothing was wrong, and its measurements."""
SMALL_DQN = """
    import gymnasium, torch
    torch.set_num_threads(1)
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback
    model = DQN("MlpPolicy", "CartPole-v1", buffer_size=20_000, learning_starts=100, device="cpu", seed=0)
"""
LOOP = """
    import numpy as np, gymnasium, holdall, time
    env = gymnasium.make("CartPole-v1")
    memory = holdall.ReplayMemory(env.observation_space, env.action_space, 1_000_000)
    def steps():
        obs, _ = env.reset(seed=0)
        while True:
            action = env.action_space.sample()
            after, reward, ended, cut, info = env.step(action)
            memory.add(obs, action, reward, after, ended, cut)
            time.sleep(0.0005)
            yield obs, reward, info
            obs = env.reset()[0] if ended or cut else after
"""
LEAKS = {
    "observations in a list": LOOP
    + """
    kept = []
    for obs, _, _ in steps():
        kept.append(np.tile(obs, 100))  # LEAK
""",
    "a deque of dicts without a length": LOOP
    + """
    from collections import deque
    episodes = deque()
    for obs, reward, _ in steps():
        episodes.append({"obs": obs.tolist(), "reward": [reward] * 100})  # LEAK
""",
    "a cache without a bound": LOOP
    + """
    import functools
    @functools.lru_cache(maxsize=None)
    def features(number):
        return np.full(400, number)  # LEAK
    for number, _ in enumerate(steps()):
        features(number)
""",
    "a log of lines": LOOP
    + """
    class Log:
        def __init__(self):
            self.lines = []
        def say(self, *words):
            self.lines.append(" ".join(str(word) for word in words) * 10)  # LEAK
    log = Log()
    for obs, reward, info in steps():
        log.say(obs, reward, info)
""",
    "a wrapper that keeps frames": LOOP
    + """
    class Recorder(gymnasium.Wrapper):
        def __init__(self, env):
            super().__init__(env)
            self.frames = {}
        def step(self, action):
            out = self.env.step(action)
            self.frames[len(self.frames)] = np.zeros((24, 24, 3), np.uint8)  # LEAK
            return out
    env = Recorder(env)
    for _ in steps():
        pass
""",
    "a class attribute": LOOP
    + """
    class Agent:
        history = []
        def learn(self, obs, reward):
            td_errors = (np.random.rand(256) - reward).tolist()  # LEAK
            Agent.history.append(td_errors)
    agent = Agent()
    for obs, reward, _ in steps():
        agent.learn(obs, reward)
""",
    "closures that hold arrays": LOOP
    + """
    hooks = []
    def hook_of(obs):
        copied = np.repeat(obs, 200)  # LEAK
        return lambda: copied.sum()
    for obs, _, _ in steps():
        hooks.append(hook_of(obs))
""",
    "a callback's infos": SMALL_DQN
    + """
    class Infos(BaseCallback):
        def __init__(self):
            super().__init__()
            self.seen = []
        def _on_step(self):
            self.seen += [{"q": list(range(200)), **info} for info in self.locals["infos"]]  # LEAK
            return True
    model.learn(10**9, callback=Infos())
""",
    "losses with their graph": LOOP
    + """
    import torch
    torch.set_num_threads(1)
    net, losses = torch.nn.Linear(4, 64), []
    for obs, reward, _ in steps():
        losses.append((net(torch.as_tensor(obs)) - reward).square().mean())  # LEAK
""",
    "a loop that reports no steps": """
    import numpy as np, time
    kept = {}
    for number in range(10**9):
        kept[number] = np.zeros(2_000)  # LEAK
        time.sleep(0.005)
""",
}
IMPORTS = (
    "torch",
    "stable_baselines3",
    "gymnasium",
    "holdall, torch",
    "numpy",
    "stable_baselines3, torch",
    "torch.utils.data",
    "holdall.sb3",
    "ale_py, gymnasium",
    "holdall",
)
ENDS = {
    "": 0,
    "raise SystemExit(3)": 3,
    "raise RuntimeError('planned')": 1,
    "os.kill(os.getpid(), 9)": 137,
    "os._exit(7)": 7,
}
SHORT = """
import os, sys, numpy as np, gymnasium, holdall
env = gymnasium.make("CartPole-v1")
memory = holdall.ReplayMemory(env.observation_space, env.action_space, 10_000)
obs, _ = env.reset(seed=0)
for step in range(int(sys.argv[1])):
    action = env.action_space.sample()
    after, reward, ended, cut, _ = env.step(action)
    memory.add(obs, action, reward, after, ended, cut)
    obs = env.reset()[0] if ended or cut else after
    if step > 64:
        memory.sample(32)
"""


# ------------------------------------------------------------ one run of each


def end(run: int, _: float) -> Line:
    """Start and end a training: with a model of Stable-Baselines3 every tenth time, else a loop of some steps."""
    words, code = list(ENDS.items())[run % len(ENDS)]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        model = f"{textwrap.dedent(SMALL_DQN)}\nmodel.learn(300)\n" if run % 10 == 0 else SHORT
        script.write_text(f"import os\n{model}\n{words}\n", encoding="utf-8")
        record = ["--record", f"{folder}/run.jsonl", "--interval", str(0.1 + run % 7 / 10)]
        command = [*WATCH, *record, "--", sys.executable, str(script), str(1 + 137 * run % 3000)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = done.stderr.replace("RuntimeError: planned", "").count("Traceback") - (code == 1)
    is_wrong = done.returncode != code or told > 0 or "without it" in done.stderr
    return {"wrong": f"exit code {done.returncode} for {code}: {done.stderr[-300:]}" if is_wrong else ""}


def imported(run: int, _: float) -> Line:
    """Watch a script that only imports."""
    names = IMPORTS[run % len(IMPORTS)]
    return {"wrong": "; ".join(_alarms([sys.executable, "-c", f"import {names}"], f"import {names}"))}


def clean(run: int, _: float) -> Line:
    """Watch a training without a leak."""
    models = ("dqn-vector", "ppo-vector", "td3-vector", "dqn-holdall", "sac-small")
    model = models[run % len(models)]
    command = [sys.executable, TRAININGS, model, "--steps", "6000", "--size", "6000", "--seed", str(run), "--plain"]
    return {"wrong": "; ".join(_alarms(command, f"{model} {run}"))}


def leak(run: int, seconds: float) -> Line:
    """Plant a leak, and check whether it is reported."""
    name = list(LEAKS)[run % len(LEAKS)]
    verdict = _found_leak(textwrap.dedent(LEAKS[name]), seconds)
    return {"leak": name, "wrong": "" if verdict and "memray run" in verdict["remedy"] else f"reported: {verdict}"}


def spill(run: int, _: float) -> Line:
    """Run memories that outgrow their control group. The last run takes no action, and must be killed."""
    if run == 0 and os.geteuid() == 0:  # the first is cold
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")
    act, expected = ("spill", 0) if run < SPILLS else ("none", -9)
    with tempfile.TemporaryDirectory() as folder:
        code, said, most = _limited(LIMIT, [sys.executable, str(HERE / "pressure.py"), act, folder])
    rate = json.loads(said)["bytes_per_second"] if code == 0 else 0.0
    wrong = "" if code == expected else f"{act}: exit code {code} for {expected}"
    return {"act": act, "bytes_per_second": rate, "highest": most, "wrong": wrong}


# ------------------------------------------------------------ all runs of one


@contextmanager
def _busy() -> Iterator[None]:
    """Keep all cores busy."""
    workers = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()


def _spilled(lines: list[Line]) -> str:
    spilled = [one for one in lines if one["act"] == "spill"]
    rates = [one["bytes_per_second"] for one in spilled if not one["wrong"]]
    without = [f"; without it: {one['wrong'] or 'killed'}" for one in lines if one["act"] == "none"]
    rate = statistics.median(rates) / 1e6 if rates else 0.0
    return (
        f"{len(rates)} of {len(spilled)} runs finished, the first cold; {rate:.0f} MB added a second{''.join(without)}"
    )


@dataclass(frozen=True)
class Showing:
    """A kind of run, how often it is made, and the figure of all its runs."""

    title: str
    one: Callable[[int, float], Line]
    runs: int
    figure: Callable[[list[Line], int], str]  # of all lines, and how many of them nothing was wrong with
    workers: int = 2
    around: Callable[[], Any] = nullcontext


SHOWINGS = {
    "ends": Showing(
        "starts and ends of trainings",
        end,
        200,
        lambda all_, right: f"{right} of {len(all_)} trainings kept their exit code, and no watch crashed",
    ),
    "imports": Showing(
        "scripts that only import, on a busy machine",
        imported,
        20,
        lambda all_, right: f"{len(all_) - right} alarms in {len(all_)} scripts",
        around=_busy,
    ),
    "clean": Showing(
        "trainings without a leak",
        clean,
        20,
        lambda all_, right: f"{len(all_) - right} alarms in {len(all_)} trainings",
    ),
    "leaks": Showing(
        "planted leaks", leak, len(LEAKS), lambda all_, right: f"{right} of {len(all_)} leaks reported", workers=5
    ),
    "spill": Showing(
        '`on_pressure="spill"` at full speed, in a control group of 400 MiB',
        spill,
        SPILLS + 1,
        lambda all_, _: _spilled(all_),
        workers=1,
    ),
}


def show(name: str, wanted: argparse.Namespace, end_at: float) -> None:
    """Make the runs of a showing that have no line yet, and write their lines."""
    showing = SHOWINGS[name]
    runs = wanted.runs or SHOWINGS[name].runs
    lock = threading.Lock()
    LINES.parent.mkdir(parents=True, exist_ok=True)
    known = {line["run"] for line in read_lines() if line["showing"] == name}
    missing = [run for run in range(runs) if run not in known]

    def one(run: int) -> None:
        if time.monotonic() > end_at:
            return
        line = {"showing": name, "run": run, "commit": commit()} | showing.one(run, wanted.seconds)
        print(f"{name} {run}: {line['wrong'] or 'fine'}", file=sys.stderr, flush=True)
        with lock, LINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    if missing:
        with showing.around(), ThreadPoolExecutor(showing.workers) as pool:
            list(pool.map(one, missing))


def read_lines() -> list[Line]:
    """Return the lines of all runs."""
    return _written(LINES)


def summarize(name: str) -> tuple[str, list[Line], list[Line]]:
    """Return the figure of all runs of a showing, the lines of all runs, and those of runs that went wrong."""
    lines = sorted((line for line in read_lines() if line["showing"] == name), key=lambda line: line["run"])
    wrong = [line for line in lines if line["wrong"]]
    return SHOWINGS[name].figure(lines, len(lines) - len(wrong)), lines, wrong


def figures_of(name: str) -> list[Figure]:
    """Return the figures of a showing."""
    measured, lines, wrong = summarize(name)
    commits = sorted({(line["commit"] or "unknown")[:8] for line in lines})
    case = f"showing: {SHOWINGS[name].title}"
    return [
        Figure(case, "measured", "", measured),
        Figure(case, "holds", "", "no" if wrong else "yes", "yes"),
        Figure(case, "runs", "", len(lines)),
        Figure(case, "commits", "", ", ".join(commits)),
    ]


def forget(names: list[str]) -> None:
    """Drop the lines of showings."""
    kept = [json.dumps(line) + "\n" for line in read_lines() if line["showing"] not in names]
    LINES.parent.mkdir(parents=True, exist_ok=True)
    LINES.write_text("".join(kept), encoding="utf-8")


# ------------------------------------------------------------ watches


def _alarms(command: list[str], name: str) -> list[str]:
    """Return the warnings of a watch, and the exit code of a command that failed."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.jsonl"
        watch = [*WATCH, "--interval", "0.5", "--record", str(record), "--", *command]
        done = subprocess.run(watch, stdout=subprocess.DEVNULL, check=False)
        told = [one for one in _written(record) if one["kind"] == "verdict" and one["severity"] != "info"]
    failed = [f"{name}: exit code {done.returncode}"] if done.returncode else []
    return failed + [f"{name}: {one['name']}: {one['text']}" for one in told]


def _found_leak(text: str, seconds: float) -> dict[str, Any] | None:
    """Run a program until a watch reports a leak."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        record = Path(folder) / "run.jsonl"
        script.write_text(text, encoding="utf-8")
        watch = [*WATCH, "--interval", "0.5", "--record", str(record), "--", sys.executable, str(script)]
        with subprocess.Popen(watch, stdout=subprocess.DEVNULL) as child:
            end = time.monotonic() + seconds
            found = None
            while found is None and time.monotonic() < end and child.poll() is None:
                time.sleep(1.0)
                found = next((one for one in _written(record) if one.get("name") == "leak"), None)
            child.send_signal(signal.SIGTERM)
    return found


def _written(record: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a record that may still be written to."""
    text = record.read_text(encoding="utf-8") if record.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _limited(limit_bytes: int, command: list[str]) -> tuple[int, str, int]:
    """Run a command in a control group of its own. Return its exit code, its output and its peak of memory."""
    group = GROUPS / f"holdall-showing-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes), encoding="ascii")
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        done = subprocess.run(["/bin/sh", "-c", enter, "sh", *command], stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, done.stdout, int((group / "memory.max_usage_in_bytes").read_text(encoding="ascii"))
    finally:
        for _ in range(50):  # a watcher beside it may still be on its way out
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.2)


def main() -> int:
    """Make the missing runs of the named showings, and store the figures of all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("showing", choices=list(SHOWINGS), nargs="+")
    parser.add_argument("--runs", type=int, help="number of runs of a showing; default: its own number")
    parser.add_argument("--seconds", type=float, default=240.0, help="time in which a leak must be found (%(default)s)")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further run after this time")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    wanted = parser.parse_args()
    end_at = time.monotonic() + 60 * wanted.minutes
    if wanted.fresh:
        forget(wanted.showing)
    holds = True
    for name in wanted.showing:
        show(name, wanted, end_at)
        measured, lines, wrong = summarize(name)
        if not lines:
            continue
        holds = holds and not wrong
        missing = max(0, SHOWINGS[name].runs - len(lines))
        print(f"{name}: {measured}; {len(wrong)} wrong, {missing} runs missing")
        if wanted.json is not None:
            store(wanted.json, figures_of(name), describe_run())
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
