"""What a script's own repository says: modules beside it, data files, registered environments, wrappers, loops."""

import os
from pathlib import Path

import pytest

from holdall.errors import ArgumentError
from holdall.tools.lint.engine import FileChecker, read_text
from holdall.tools.lint.finding import Finding, Severity
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES
from holdall.tools.lint.source import repository

ENVS = """
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import register

class Camera(gym.Env):
    def __init__(self, size=84, stack=4):
        self.observation_space = spaces.Box(0, 255, (size, size, stack), np.uint8)
        self.action_space = spaces.Discrete(4)

class Half(gym.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        height, width, channels = env.observation_space.shape
        self.observation_space = spaces.Box(0, 255, (height // 2, width // 2, channels), np.uint8)

register(id="Camera-v0", entry_point="robot.envs:Camera", max_episode_steps=500, kwargs={"size": 128})
"""
HEAD = "import gymnasium as gym\nfrom stable_baselines3 import DQN\n"


def pixels(size: int) -> int:
    """Bytes of 100,000 transitions of a camera of four channels, as Stable-Baselines3 stores them."""
    return 100_000 * (2 * size * size * 4 + 8 + 12)


def findings(root: Path, script: str, **files: str) -> list[Finding]:
    (root / ".git").mkdir()
    (root / "robot").mkdir()
    (root / "robot" / "__init__.py").write_text("from .envs import Camera\n")
    (root / "robot" / "envs.py").write_text(ENVS)
    for name, text in files.items():
        (root / name.replace("_", ".")).write_text(text)
    (root / "train.py").write_text(script)
    return FileChecker(RULES, REFERENCE_MACHINE).check(root / "train.py")


def large(found: list[Finding]) -> list[int]:
    return [int(one.numbers["needed_bytes"]) for one in found if one.rule == "M19"]


@pytest.mark.parametrize(
    ("script", "size"),
    [
        ("from robot.envs import Camera\nDQN('CnnPolicy', Camera(), buffer_size=100_000)", 84),
        ("from robot import Camera\nDQN('CnnPolicy', Camera(size=64), buffer_size=100_000)", 64),
        ("import robot\nDQN('CnnPolicy', gym.make('Camera-v0'), buffer_size=100_000)", 128),
        ("DQN('CnnPolicy', gym.make('robot:Camera-v0', size=96), buffer_size=100_000)", 96),
        ("from robot.envs import Camera, Half\nDQN('CnnPolicy', Half(Camera(168)), buffer_size=100_000)", 84),
        (
            "import robot.envs as e\ndef f():\n    return e.Camera(96)\nDQN('CnnPolicy', f(), buffer_size=100_000)",
            96,
        ),
    ],
)
def test_environments_of_the_repository_are_followed(tmp_path: Path, script: str, size: int) -> None:
    assert large(findings(tmp_path, HEAD + script)) == [pixels(size)]


@pytest.mark.parametrize(
    ("load", "file"),
    [
        ("import yaml\nc = yaml.safe_load(open('c.yaml'))", "buffer: {size: 100000}"),
        ("import json\nwith open('c.json') as f:\n    c = json.load(f)", '{"buffer": {"size": 100000}}'),
        (
            "import os, yaml\nc = yaml.safe_load(open(os.path.join(os.path.dirname(__file__), 'c.yaml')))",
            "buffer: {size: 1e5}",
        ),
    ],
)
def test_a_file_of_settings_beside_the_script_is_read(tmp_path: Path, load: str, file: str) -> None:
    name = "c_json" if "json" in load else "c_yaml"
    script = (
        HEAD
        + f"from robot.envs import Camera\n{load}\nDQN('CnnPolicy', Camera(), buffer_size=int(c['buffer']['size']))"
    )
    assert large(findings(tmp_path, script, **{name: file})) == [pixels(84)]


def test_a_branch_is_named_in_the_finding(tmp_path: Path) -> None:
    script = HEAD + (
        "import argparse\nfrom robot.envs import Camera\np = argparse.ArgumentParser()\n"
        "p.add_argument('--large', action='store_true')\nargs = p.parse_args()\n"
        "size = 168 if args.large else 84\nDQN('CnnPolicy', Camera(size), buffer_size=100_000)\n"
    )
    found = findings(tmp_path, script)
    assert large(found)[0] == pixels(84)


def test_a_callback_that_holds_its_own_model_ends_no_run(tmp_path: Path) -> None:
    script = HEAD + (
        "from stable_baselines3.common.callbacks import BaseCallback\n"
        "class Periodic(BaseCallback):\n    def _on_step(self):\n        self.model.save('x')\n"
        "        o = Periodic()\n        o.model = self.model\n        return True\n"
    )
    assert findings(tmp_path, script) == []


def test_a_file_that_lint_fails_on_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("holdall.tools.lint.engine.check_text", fails)
    (tmp_path / "train.py").write_text("x = 1")
    (one,) = FileChecker(RULES, REFERENCE_MACHINE).check(tmp_path / "train.py", walked=True)
    assert (one.rule, one.severity) == ("F01", Severity.WARNING)
    assert "planted" in one.message


def test_a_deque_of_images_costs_what_it_keeps_and_a_shared_image_counts_once(tmp_path: Path) -> None:
    script = (
        "import gymnasium as gym\nfrom collections import deque\nfrom robot.envs import Camera\n"
        "env = Camera()\nmemory = deque(maxlen=100_000)\nobs, _ = env.reset()\n"
        "for _ in range(10):\n    next_obs, r, d, t, _ = env.step(0)\n"
        "    memory.append((obs, 0, r, next_obs, d))\n    obs = next_obs\n"
    )
    (size,) = large(findings(tmp_path, script))
    assert size == pytest.approx(100_000 * 84 * 84 * 4, rel=0.01)


def test_a_directory_s_yaml_that_is_about_something_else_is_not_parsed(tmp_path: Path) -> None:
    file = tmp_path / "mkdocs.yml"
    file.write_text("extensions:\n  emoji: !!python/name:materialx.emoji.twemoji\n", encoding="utf-8")
    checker = FileChecker(RULES, REFERENCE_MACHINE)
    assert checker.check(file, walked=True) == []
    assert [one.rule for one in checker.check(file)] == ["F01"]
    file.write_text("CartPole-v1:\n  policy: MlpPolicy\n  n_steps: [\n", encoding="utf-8")
    assert [one.rule for one in checker.check(file, walked=True)] == ["F01"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a pipe with a name")
@pytest.mark.timeout(60)  # reading a pipe would wait for ever
def test_a_pipe_beside_a_script_is_not_waited_for(tmp_path: Path) -> None:
    """Neither as a module, nor as a file of settings, nor as the script."""
    (tmp_path / "requirements.txt").touch()
    for name in ("config.yaml", "settings.json", "module.py", "train.py"):
        os.mkfifo(tmp_path / name)
    script = tmp_path / "main.py"
    script.write_text("import json, module\nimport yaml, sys\na = yaml.safe_load(open(sys.argv[1]))\nprint(a['n'])\n")
    assert [one.rule for one in FileChecker(RULES, REFERENCE_MACHINE).check(script)] == []
    with pytest.raises(ArgumentError, match="no regular file"):
        read_text(tmp_path / "train.py")


def test_a_file_that_is_too_long_for_settings_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "_MOST_TEXT_BYTES", 10)
    (tmp_path / "data.json").write_text('{"buffer_size": 1}')
    assert repository._text_of(tmp_path / "data.json") == ""
