"""What `holdall watch` must survive and find: `python benchmarks/watch_showings.py ends|imports|clean|lines|spill`.

    ends     starts and ends of real trainings under a watch: no crash, every exit code kept
    imports  scripts that only import, on a busy machine: no alarm
    clean    trainings that leak nothing, on a busy machine: no alarm
    lines    planted leaks of ten kinds: the line that allocates is named
    spill    a memory that outgrows its control group at full speed, the first run cold: it finishes (needs root)
    trace    what a trace costs while it runs

Out: one row a showing in benchmarks/results/watch_showings.json; rows of the file that are not run stay.
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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from process import commit, machine, versions

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "watch_showings.json"
WATCH = [sys.executable, "-m", "holdall", "watch"]
TRAININGS = str(HERE / "watch_trainings.py")
GROUPS = Path("/sys/fs/cgroup/memory")
MIB = 2**20
LIMIT = 400 * MIB
Row = dict[str, Any]
TITLES = {
    "ends": "starts and ends of trainings", "imports": "scripts that only import, on a busy machine",
    "clean": "trainings without a leak", "lines": "planted leaks",
    "spill": '`on_pressure="spill"` at full speed, in a control group of 400 MiB', "trace": "cost of a trace",
}  # fmt: skip

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
    "observations in a list": LOOP + """
    kept = []
    for obs, _, _ in steps():
        kept.append(np.tile(obs, 100))  # LEAK
""",
    "a deque of dicts without a length": LOOP + """
    from collections import deque
    episodes = deque()
    for obs, reward, _ in steps():
        episodes.append({"obs": obs.tolist(), "reward": [reward] * 100})  # LEAK
""",
    "a cache without a bound": LOOP + """
    import functools
    @functools.lru_cache(maxsize=None)
    def features(number):
        return np.full(400, number)  # LEAK
    for number, _ in enumerate(steps()):
        features(number)
""",
    "a log of lines": LOOP + """
    class Log:
        def __init__(self):
            self.lines = []
        def say(self, *words):
            self.lines.append(" ".join(str(word) for word in words) * 10)  # LEAK
    log = Log()
    for obs, reward, info in steps():
        log.say(obs, reward, info)
""",
    "a wrapper that keeps frames": LOOP + """
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
    "a class attribute": LOOP + """
    class Agent:
        history = []
        def learn(self, obs, reward):
            td_errors = (np.random.rand(256) - reward).tolist()  # LEAK
            Agent.history.append(td_errors)
    agent = Agent()
    for obs, reward, _ in steps():
        agent.learn(obs, reward)
""",
    "closures that hold arrays": LOOP + """
    hooks = []
    def hook_of(obs):
        copied = np.repeat(obs, 200)  # LEAK
        return lambda: copied.sum()
    for obs, _, _ in steps():
        hooks.append(hook_of(obs))
""",
    "a callback's infos": SMALL_DQN + """
    class Infos(BaseCallback):
        def __init__(self):
            super().__init__()
            self.seen = []
        def _on_step(self):
            self.seen += [{"q": list(range(200)), **info} for info in self.locals["infos"]]  # LEAK
            return True
    model.learn(10**9, callback=Infos())
""",
    "losses with their graph": LOOP + """
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
}  # fmt: skip
IMPORTS = (
    "torch", "stable_baselines3", "gymnasium", "holdall, torch", "numpy", "stable_baselines3, torch",
    "torch.utils.data", "holdall.sb3", "ale_py, gymnasium", "holdall",
)  # fmt: skip
ENDS = {
    "": 0, "raise SystemExit(3)": 3, "raise RuntimeError('planned')": 1, "os.kill(os.getpid(), 9)": 137,
    "os._exit(7)": 7,
}  # fmt: skip
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


def ends(wanted: argparse.Namespace) -> Row:
    """Start and end trainings: with a model of Stable-Baselines3 every tenth time, else a loop of some steps."""
    wrong: list[str] = []

    def one(run: int) -> None:
        words, code = list(ENDS.items())[run % len(ENDS)]
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "train.py"
            model = f"{textwrap.dedent(SMALL_DQN)}\nmodel.learn(300)\n" if run % 10 == 0 else SHORT
            script.write_text(f"import os\n{model}\n{words}\n", encoding="utf-8")
            record = ["--record", f"{folder}/run.jsonl", "--interval", str(0.1 + run % 7 / 10)]
            command = [*WATCH, *record, "--", sys.executable, str(script), str(1 + 137 * run % 3000)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            told = done.stderr.replace("RuntimeError: planned", "").count("Traceback") - (code == 1)
            if done.returncode != code or told > 0 or "without it" in done.stderr:
                wrong.append(f"run {run}: {done.returncode} for {code}: {done.stderr[-300:]}")
            print(f"run {run}: exit code {done.returncode}, {len(wrong)} wrong so far", file=sys.stderr)

    _in_parallel(one, wanted.runs or 200)
    runs = wanted.runs or 200
    return _row("ends", f"{runs - len(wrong)} of {runs} trainings kept their exit code, and no watch crashed",
                holds=not wrong, runs=runs, wrong=wrong)  # fmt: skip


def imports(wanted: argparse.Namespace) -> Row:
    """Watch scripts that only import, two at a time beside work that keeps every core busy."""
    runs, alarms = wanted.runs or 20, list[str]()

    def one(run: int) -> None:
        names = IMPORTS[run % len(IMPORTS)]
        alarms.extend(_alarms([sys.executable, "-c", f"import {names}"], f"import {names}"))

    with _busy():
        _in_parallel(one, runs)
    return _row("imports", f"{len(alarms)} alarms in {runs} scripts", holds=not alarms, runs=runs, alarms=alarms)


def clean(wanted: argparse.Namespace) -> Row:
    """Watch trainings without a leak, two at a time."""
    runs, alarms = wanted.runs or 20, list[str]()
    models = ("dqn-vector", "ppo-vector", "td3-vector", "dqn-holdall", "sac-small")

    def one(run: int) -> None:
        model = models[run % len(models)]
        command = [sys.executable, TRAININGS, model, "--steps", "6000", "--size", "6000", "--seed", str(run), "--plain"]
        alarms.extend(_alarms(command, f"{model} {run}"))

    _in_parallel(one, runs)
    return _row("clean", f"{len(alarms)} alarms in {runs} trainings", holds=not alarms, runs=runs, alarms=alarms)


def lines(wanted: argparse.Namespace) -> Row:
    """Plant leaks, and look which line is named."""
    found: dict[str, str] = {}

    def one(run: int) -> None:
        name = list(LEAKS)[run % len(LEAKS)]
        text = textwrap.dedent(LEAKS[name])
        expected = next(at for at, line in enumerate(text.splitlines(), 1) if "# LEAK" in line)
        named = _named_line(text, wanted.seconds)
        found[name] = "named" if named == f"train.py:{expected}" else f"not line {expected}, but {named}"

    _in_parallel(one, wanted.runs or len(LEAKS), 5)  # they sleep most of the time
    right = sum(word == "named" for word in found.values())
    return _row("lines", f"{right} of {len(found)} leaks: the line is named", holds=right == len(found), found=found)


def spill(wanted: argparse.Namespace) -> Row:
    """Let a memory outgrow its control group; the file cache is dropped before the first run."""
    runs, killed, rates, highest = wanted.runs or 50, 0, [], 0
    if os.geteuid() == 0:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")
    for run in range(runs + 1):
        act = "spill" if run < runs else "none"
        with tempfile.TemporaryDirectory() as folder:
            code, said, most = _limited(LIMIT, [sys.executable, str(HERE / "watch_pressure.py"), act, folder])
        print(f"run {run} ({act}): exit code {code}, at most {most / MIB:.0f} MiB", file=sys.stderr)
        if act == "none":
            continue
        killed, highest = killed + (code != 0), max(highest, most)
        rates += [json.loads(said)["bytes_per_second"]] if code == 0 else []
    rate = statistics.median(rates) / 1e6 if rates else 0.0
    without = "killed" if code == -9 else f"exit code {code}"
    return _row(
        "spill",
        f"{runs - killed} of {runs} runs finished, the first cold; {rate:.0f} MB added a second; without it: {without}",
        holds=killed == 0 and code == -9, runs=runs, limit=LIMIT, group="control group, version 1", highest=highest,
        megabytes_per_second=rate,
    )  # fmt: skip


def trace(_: argparse.Namespace) -> Row:
    """Compare the steps of a training with and without a trace, by turns."""
    done = subprocess.run(
        [sys.executable, TRAININGS, "dqn-vector", "--traces", "6"], stdout=subprocess.PIPE, check=True
    )
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    slower = [traced["cpu"] / plain["cpu"] for plain, traced in zip(turns[::2], turns[1::2], strict=True)]
    figure = f"a step of a small DQN takes {statistics.median(slower):.1f} times as long while a leak is traced"
    return _row("trace", figure, holds=True, slower=slower)


CASES: dict[str, Callable[[argparse.Namespace], Row]] = {
    "ends": ends, "imports": imports, "clean": clean, "lines": lines, "spill": spill, "trace": trace,
}  # fmt: skip


def _row(name: str, figure: str, *, holds: bool, **evidence: Any) -> Row:
    return {"showing": name, "figure": figure, "holds": holds, "evidence": evidence, "commit": commit()}


def _in_parallel(one: Callable[[int], None], runs: int, workers: int = 2) -> None:
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, range(runs)))


@contextmanager
def _busy() -> Iterator[None]:
    """Keep all cores busy."""
    workers = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()


def _alarms(command: list[str], name: str) -> list[str]:
    """Return what a watch warned of, and exit codes that are none."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.jsonl"
        watch = [*WATCH, "--interval", "0.5", f"--json={record}", "--", *command]
        done = subprocess.run(watch, stdout=subprocess.DEVNULL, check=False)
        told = [one for one in _written(record) if one["kind"] == "verdict" and one["severity"] != "info"]
    failed = [f"{name}: exit code {done.returncode}"] if done.returncode else []
    return failed + [f"{name}: {one['name']}: {one['text']}" for one in told]


def _named_line(text: str, seconds: float) -> str | None:
    """Run a program until a watch names a line."""
    with tempfile.TemporaryDirectory() as folder:
        script, record = Path(folder) / "train.py", Path(folder) / "run.jsonl"
        script.write_text(text, encoding="utf-8")
        watch = [*WATCH, "--interval", "0.5", f"--json={record}", "--", sys.executable, str(script)]
        with subprocess.Popen(watch, stdout=subprocess.DEVNULL) as child:
            end, named = time.monotonic() + seconds, None
            while named is None and time.monotonic() < end and child.poll() is None:
                time.sleep(1.0)
                told = [one["evidence"].get("line") for one in _written(record) if one.get("name") == "leak"]
                named = next((Path(line).name for line in told if line), None)
            child.send_signal(signal.SIGTERM)
    return named


def _written(record: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a record that may still be written to."""
    text = record.read_text(encoding="utf-8") if record.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _limited(limit_bytes: int, command: list[str]) -> tuple[int, str, int]:
    """Run a command in a control group of its own; return its exit code, what it said, and its highest use."""
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


def _write_docs(rows: list[Row]) -> None:
    """Put the figures into docs/watch.md."""
    page = HERE.parent / "docs" / "watch.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(
        "<!-- showings: python benchmarks/watch_showings.py -->\n"
    )
    _, end, after = rest.partition("<!-- end of showings -->")
    lines = ["| what | measured |", "|---|---|", *(f"| {TITLES[row['showing']]} | {row['figure']} |" for row in rows)]
    page.write_text(before + begin + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


def main() -> int:
    """Run the showings that are named, and keep their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("showing", choices=sorted(CASES), nargs="+")
    parser.add_argument("--runs", type=int, help="fewer or more than are asked for")
    parser.add_argument("--seconds", type=float, default=240.0, help="at most, for a leak to be found")
    wanted = parser.parse_args()
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    rows = [CASES[name](wanted) for name in wanted.showing]
    for row in rows:
        print(f"{row['showing']}: {row['figure']}{'' if row['holds'] else '  (DOES NOT HOLD)'}")
    rest = [row for row in kept if row["showing"] not in wanted.showing]
    known = sorted(rest + rows, key=lambda row: list(CASES).index(row["showing"]))
    text = {"machine": machine(), "versions": versions(), "rows": known}
    RESULTS.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    _write_docs(known)
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
