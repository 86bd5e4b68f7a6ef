"""Make the table of environments that lint knows by id, where their packages are installed.

    pip install 'gymnasium[atari,box2d,classic-control,toy-text,mujoco]' minigrid highway-env gymnasium-robotics \
        miniworld vizdoom panda-gym
    python benchmarks/lint_environments.py

In:  every id that the installed packages register.  Out: src/holdall/tools/lint/environments.json: by observation and
action space, in the notation of `holdall plan`, the ids that have them, and the time limit of an id where it has one.
Ids of one game that differ by version only stand once, if they have the same spaces.
"""

import contextlib
import importlib
import json
import re
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium import spaces

FILE = Path(__file__).parents[1] / "src" / "holdall" / "tools" / "lint" / "environments.json"
PACKAGES = ("ale_py", "minigrid", "highway_env", "gymnasium_robotics", "panda_gym", "vizdoom.gymnasium_wrapper",
            "miniworld")  # fmt: skip
TEXTS = {"Text", "MissionSpace"}
PROCGEN = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot", "heist", "jumper",
    "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
# Ids that newer packages no longer make, with the spaces that their documentation gives.
OLDER = {
    "111:float64 8": ("Ant-v2", "Ant-v3"),
    "376:float64 17": ("Humanoid-v2", "Humanoid-v3", "HumanoidStandup-v2"),
    "17:float64 6": ("HalfCheetah-v2", "HalfCheetah-v3", "Walker2d-v2", "Walker2d-v3"),
    "11:float64 3": ("Hopper-v2", "Hopper-v3"),
    "8:float64 2": ("Swimmer-v2", "Swimmer-v3"),
    "11:float64 2": ("Reacher-v2",),
    "23:float64 7": ("Pusher-v2",),
    "4:float64 1": ("InvertedPendulum-v2",),
    "11:float64 1": ("InvertedDoublePendulum-v2",),
    "3:float32 1": ("Pendulum-v0",),
    "4:float32 discrete(2)": ("CartPole-v0",),
    "8:float32 discrete(4)": ("LunarLander-v2",),
    "8:float32 2": ("LunarLanderContinuous-v2",),
    "24:float32 4": ("BipedalWalker-v2",),
    "96x96x3:uint8 3": ("CarRacing-v0", "CarRacing-v1", "CarRacing-v2"),
    "240x256x3:uint8 discrete(256)": tuple(
        f"SuperMarioBros{stage}-v{version}"
        for version in range(4)
        for stage in ("", "2", "RandomStages", *(f"-{world}-{level}" for world in range(1, 9) for level in range(1, 5)))
    ),
    "64x64x3:uint8 discrete(17)": ("CrafterReward-v1", "CrafterNoReward-v1"),
    "64x64x3:uint8 discrete(15)": tuple(f"procgen-{game}-v0" for game in PROCGEN),
}  # fmt: skip


def text(space: spaces.Space[Any]) -> str | None:
    """Write a space as `holdall plan` reads it."""
    match space:
        case spaces.Box():
            shape = "x".join(map(str, space.shape))
            return f"{shape}:{space.dtype.name}" if shape else None
        case spaces.Discrete():
            return f"discrete({space.n})"
        case spaces.MultiDiscrete() if space.nvec.ndim == 1:
            return f"multidiscrete({','.join(map(str, space.nvec))})"
        case spaces.MultiBinary() if isinstance(space.n, int):
            return f"multibinary({space.n})"
        case spaces.Dict():
            arrays = {name: one for name, one in space.spaces.items() if type(one).__name__ not in TEXTS}
            parts = {name: text(child) for name, child in arrays.items()}
            return None if None in parts.values() else "+".join(f"{name}={part}" for name, part in parts.items())
    return None


def main() -> None:
    """Make every environment once, and write the table."""
    warnings.simplefilter("ignore")
    for package in PACKAGES:
        with contextlib.suppress(Exception):
            found = importlib.import_module(package)
            if package in {"ale_py", "gymnasium_robotics"}:
                gym.register_envs(found)
    table: dict[str, list[str]] = {spaces_: list(ids) for spaces_, ids in OLDER.items()}
    steps: dict[str, int] = {}
    for name, spec in sorted(gym.registry.items()):
        if re.search(r"(Deterministic|-ram|NoFrameskip-v0|^phys2d|^tabular|^GymV)", name):
            continue
        try:
            env = gym.make(name)
        except Exception as error:  # whatever a package lacks here, the others go on
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        seen, acted = text(env.observation_space), text(env.action_space)
        if seen and acted:
            acted = acted.removesuffix(":float32")
            table.setdefault(f"{seen} {acted}", []).append(name)
            if spec.max_episode_steps:
                steps[name] = spec.max_episode_steps
        env.close()
    known = {key: " ".join(sorted(set(ids))) for key, ids in sorted(table.items())}
    FILE.write_text(json.dumps({"spaces": known, "steps": steps}, indent=0) + "\n", encoding="utf-8")
    print(
        f"{sum(len(ids.split()) for ids in known.values())} ids in {len(known)} spaces: {FILE.stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    main()
