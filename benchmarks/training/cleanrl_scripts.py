"""CleanRL's published scripts with their own replay buffer and with holdall's: weights, memory and times of both.

    python benchmarks/training/cleanrl_scripts.py --cleanrl DIR [--script dqn] [--rounds 3] [--json FILE]

DIR is a checkout of CleanRL, with the folders `cleanrl` and `cleanrl_utils`. The interpreter needs what the scripts
need: gymnasium 0.29, torch, tyro and tensorboard; ale-py 0.10 and opencv for Atari; mujoco; jax, flax and optax.

Every run is a fresh process that reads a script, exchanges the one line that imports the buffer, and runs the script
for a few steps in a temporary folder. The sides take turns. Weights are compared by a digest of all parameters at the
end of a script. Times of `add` and `sample` are medians over the calls of a run, and the time of a run is its CPU time.
The figures are medians over rounds. On a busy machine, set OMP_NUM_THREADS=1.

`dqn_atari_cut` is dqn_atari.py in Breakout with a time limit of 60 steps. There, CleanRL's buffer with
`optimize_memory_usage` returns first observations of the next episode. So holdall's weights must be those of CleanRL's
buffer without that option. The exit status is 1 if weights differ that must be the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, show, store
from shared.process import emit

IMPORT = "from cleanrl_utils.buffers import ReplayBuffer\n"
SIDES = {
    "cleanrl": IMPORT,
    "cleanrl plain": (
        "import cleanrl_utils.buffers\n"
        "def ReplayBuffer(*given, optimize_memory_usage, **settings):\n"
        "    return cleanrl_utils.buffers.ReplayBuffer(*given, **settings)\n"
    ),
    "holdall": "from holdall.cleanrl import ReplayBuffer\n",
    "holdall compressed": (
        "import functools, holdall.cleanrl\n"
        "ReplayBuffer = functools.partial(holdall.cleanrl.ReplayBuffer, budget=None)\n"
    ),
}
"""What stands in the place of the line that imports the buffer."""
BOTH = ("cleanrl", "holdall")
ACTS = ("add", "sample")


class Run(NamedTuple):
    """One script, what it is started with, and whose weights holdall's must be."""

    script: str
    options: str
    sides: tuple[str, ...] = BOTH
    reference: str = "cleanrl"


_CART = "--total-timesteps 8000 --learning-starts 1000 --buffer-size 4000"
_CONTROL = "--total-timesteps 1500 --learning-starts 300 --buffer-size 1000"
_ATARI = "--total-timesteps 2500 --learning-starts 1000 --buffer-size 1500"
RUNS = {
    "dqn": Run("dqn", _CART),
    "c51": Run("c51", _CART),
    "dqn_jax": Run("dqn_jax", _CART),
    "ddpg": Run("ddpg_continuous_action", f"--env-id Pendulum-v1 {_CONTROL}"),
    "td3": Run("td3_continuous_action", _CONTROL),
    "sac": Run("sac_continuous_action", _CONTROL),
    "td3_jax": Run("td3_continuous_action_jax", f"--env-id Pendulum-v1 {_CONTROL}"),
    "dqn_atari": Run("dqn_atari", _ATARI, (*BOTH, "holdall compressed")),
    "dqn_atari_cut": Run(
        "dqn_atari",
        "--env-id CutBreakout-v4 --total-timesteps 900 --learning-starts 400 --buffer-size 901",
        (*BOTH, "cleanrl plain"),
        "cleanrl plain",
    ),
}


# ---------------------------------------------------------------- one side in one process


def run(name: str, side: str, folder: Path) -> dict[str, Any]:
    """Run a script with one side's buffer. Return its weights' digest, its memory and its times."""
    wanted = RUNS[name]
    path = folder / "cleanrl" / f"{wanted.script}.py"
    source = path.read_text(encoding="utf-8")
    if source.count(IMPORT) != 1:
        raise SystemExit(f"{path} has {source.count(IMPORT)} lines {IMPORT.strip()!r}, expected 1: another version?")
    sys.path.insert(0, str(folder))
    if "atari" in wanted.script:
        register_breakout()
    times = timed_calls("holdall.cleanrl" if side.startswith("holdall") else "cleanrl_utils.buffers")
    sys.argv = [str(path), *wanted.options.split()]
    script = types.ModuleType("__main__")
    script.__file__ = str(path)
    sys.modules["__main__"] = script  # dataclasses and tyro look names up there
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    cpu = time.process_time()
    exec(compile(source.replace(IMPORT, SIDES[side]), str(path), "exec"), vars(script))
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - cpu
    buffer = vars(script)["rb"]
    return {
        "weights": digest(vars(script)),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "peak_before_bytes": 1024 * before,
        "bytes_per_transition": buffer_bytes(buffer) / (buffer.size() * buffer.n_envs),
        "calls": {act: len(times[act]) for act in ACTS},
        "us": {act: 1e6 * statistics.median(times[act]) for act in ACTS},
    }


def register_breakout() -> None:
    """Make Atari known to gymnasium 0.29, whose plug-ins ale-py no longer is, and a game with a time limit."""
    import ale_py  # noqa: F401, PLC0415  importing it registers the games
    import gymnasium  # noqa: PLC0415  children alone need it

    game = gymnasium.spec("BreakoutNoFrameskip-v4")
    gymnasium.register("CutBreakout-v4", game.entry_point, kwargs=game.kwargs, max_episode_steps=240)


def timed_calls(module: str) -> dict[str, list[float]]:
    """Time every `add` and `sample` of a module's buffer from outside. Seconds are appended to what is returned."""
    kind = __import__(module, fromlist=["ReplayBuffer"]).ReplayBuffer
    seconds: dict[str, list[float]] = {act: [] for act in ACTS}

    def timed(act: str, call: Callable[..., Any]) -> Callable[..., Any]:
        note = seconds[act].append

        def timing(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **options)
            note(time.perf_counter() - start)
            return result

        return timing

    for act in ACTS:
        setattr(kind, act, timed(act, getattr(kind, act)))
    return seconds


def digest(names: dict[str, Any]) -> str:
    """Hash all parameters of networks of torch and train states of flax, by the name of the variable."""
    hashed = hashlib.sha256()
    for name in sorted(names):
        value = names[name]
        if isinstance(value, type):
            continue
        if hasattr(value, "state_dict") and hasattr(value, "parameters"):
            arrays = [array.detach().cpu().numpy() for array in value.state_dict().values()]
        elif hasattr(value, "params") and hasattr(value, "target_params"):
            import jax  # noqa: PLC0415  only where a script has imported it

            arrays = [jax.device_get(array) for array in jax.tree.leaves((value.params, value.target_params))]
        else:
            continue
        hashed.update(name.encode())
        for array in arrays:
            hashed.update(array.tobytes())
    return hashed.hexdigest()


def buffer_bytes(buffer: Any) -> int:
    """Count the bytes of a buffer: holdall's report, or all arrays of CleanRL's."""
    if hasattr(buffer, "memory"):
        buffer.memory.store.wait_idle()
        return int(buffer.report().total_bytes)
    return sum(int(array.nbytes) for array in vars(buffer).values() if hasattr(array, "nbytes"))


# ---------------------------------------------------------------- all of them


def measure(names: list[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Run all sides in turn, each in a fresh process, and return medians over rounds."""
    found: dict[str, dict[str, list[Any]]] = {}
    for turn in range(rounds):
        for name in names:
            sides = RUNS[name].sides
            for side in sides if turn % 2 == 0 else sides[::-1]:
                result = _in_a_process(name, side, folder)
                found.setdefault(name, {}).setdefault(side, []).append(result)
                print(f"round {turn + 1} of {rounds}: {name}, {side}: {result['seconds']:.1f} s", file=sys.stderr)
    return {name: {side: _median(results) for side, results in sides.items()} for name, sides in found.items()}


def _in_a_process(name: str, side: str, folder: Path) -> Any:
    chosen = ["--cleanrl", str(folder), "--script", name, "--side", side]
    command = [sys.executable, str(Path(__file__).resolve()), *chosen]
    with tempfile.TemporaryDirectory() as there:  # the scripts write their logs below the working directory
        path = os.pathsep.join(part for part in sys.path if part)
        done = subprocess.run(
            command, cwd=there, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{name} with {side} failed with exit status {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])["result"]


def _median(results: list[Any]) -> Any:
    """Return medians of numbers, and whatever else is the same in all results."""
    first = results[0]
    if isinstance(first, dict):
        return {key: _median([result[key] for result in results]) for key in first}
    if isinstance(first, str):
        return first if len(set(results)) == 1 else "not the same in all rounds"
    return statistics.median(results)


def figures_of(name: str, sides: dict[str, Any]) -> list[Figure]:
    """Return the figures of a script, with the side whose weights are right first."""
    reference = RUNS[name].reference
    figures = []
    for side in sorted(sides, key=lambda side: side != reference):
        row = sides[side]
        case = f"{name}: {side}"
        if side != reference:
            is_same = row["weights"] == sides[reference]["weights"]
            bar = "the same" if side.startswith("holdall") else None
            figures.append(Figure(case, "weights", "", "the same" if is_same else "others", bar))
        figures.append(Figure(case, "a transition takes", "B", row["bytes_per_transition"]))
        figures += [Figure(case, f"`{act}`", "us", row["us"][act]) for act in ACTS]
        figures.append(Figure(case, "CPU time of the run", "s", row["cpu_seconds"]))
    return figures


def main() -> int:
    """Read the command line. Run one side here, or all of them in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleanrl", type=Path, required=True, metavar="DIR", help="a checkout of CleanRL")
    parser.add_argument("--script", choices=RUNS, metavar="NAME", help=f"{', '.join(RUNS)}; default: all")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # a child's
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side (%(default)s)")
    parser.add_argument("--short", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    wanted = parser.parse_args()
    folder = wanted.cleanrl.resolve()
    if not (folder / "cleanrl_utils" / "buffers.py").is_file():
        parser.error(f"--cleanrl ({folder}) has no cleanrl_utils/buffers.py; name a checkout of CleanRL")
    if wanted.side:
        emit({"result": run(wanted.script, wanted.side, folder)})
        return 0
    found = measure([wanted.script] if wanted.script else list(RUNS), folder, 1 if wanted.short else wanted.rounds)
    are_same = all(
        results[side]["weights"] == results[RUNS[name].reference]["weights"]
        for name, results in found.items()
        for side in results
        if side.startswith("holdall")
    )
    described = describe_run({"short": wanted.short}, ("tyro", "flax", "mujoco", "jax"))
    for name, sides in found.items():
        figures = figures_of(name, sides)
        show(figures)
        if wanted.json:
            store(wanted.json, figures, described)
    return 0 if are_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
