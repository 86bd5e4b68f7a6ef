"""Stable-Baselines3 2.7.0, really installed in an environment of its own: its buffers against our arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("stable_baselines3")

from holdall.tools.plan.environments import space_to_dict
from holdall.tools.plan.spec import leaves_of, parse_version, replay_buffer, rollout_buffer

_OBS: dict[str, spaces.Space[Any]] = {
    "image": spaces.Box(0, 255, (36, 36, 4), np.uint8),
    "float64": spaces.Box(-1, 1, (5,), np.float64),
    "discrete": spaces.Discrete(7),
    "dict": spaces.Dict({"i": spaces.Box(0, 255, (9, 8, 3), np.uint8), "v": spaces.Box(-1, 1, (31,), np.float32)}),
}
_ACTIONS: list[spaces.Space[Any]] = [
    spaces.Discrete(4),
    spaces.Box(-1, 1, (8,), np.float64),
    spaces.MultiBinary(5),
    spaces.MultiDiscrete([3, 4]),
]
_THEIRS = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy as np, stable_baselines3
from stable_baselines3.common import buffers
from holdall.tools.plan.environments import space_from_dict
found = []
for case in json.load(sys.stdin):
    cls = getattr(buffers, case["class"])
    obs, action = space_from_dict(case["obs"]), space_from_dict(case["action"])
    made = cls(case["size"], obs, action, device="cpu", n_envs=case["n_envs"])
    arrays = [a for v in vars(made).values() for a in (v.values() if isinstance(v, dict) else [v])]
    found.append(sum(a.nbytes for a in arrays if isinstance(a, np.ndarray)))
print(json.dumps({"version": stable_baselines3.__version__, "nbytes": found}))
"""


def _cases() -> list[dict[str, Any]]:
    cases = []
    for name, obs in _OBS.items():
        prefix = "Dict" if name == "dict" else ""
        classes = [f"{prefix}ReplayBuffer", f"{prefix}RolloutBuffer", *([] if prefix else ["NStepReplayBuffer"])]
        cases += [
            {"class": cls, "obs": obs, "action": action, "size": 37, "n_envs": 1 + number}
            for cls in classes
            for number, action in enumerate(_ACTIONS)
        ]
    return cases


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["2.7.0"])
def test_every_buffer_of_the_older_version_has_the_bytes_we_say(version: str, tmp_path: Path) -> None:
    python = _installed(version, tmp_path)
    cases = _cases()
    plain = [case | {"obs": space_to_dict(case["obs"]), "action": space_to_dict(case["action"])} for case in cases]
    done = subprocess.run(
        [str(python), "-c", _THEIRS], input=json.dumps(plain), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout)
    assert theirs["version"] == version
    for case, nbytes in zip(cases, theirs["nbytes"], strict=True):
        (action,) = leaves_of(case["action"], "action")
        build = rollout_buffer if "Rollout" in case["class"] else replay_buffer
        layout = build(
            leaves_of(case["obs"], "obs"),
            action,
            case["size"],
            case["n_envs"],
            buffer_class=case["class"],
            sb3=parse_version(version),
        )
        assert layout.nbytes == nbytes, case


def _installed(version: str, directory: Path) -> Path:
    """Install one version of Stable-Baselines3 over this environment's other packages."""
    made = directory / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True, timeout=120)
    python = made / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = Path(subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(theirs)]
    # Older versions import both of these, whether or not they are used.
    beside = ["pandas", "matplotlib", f"numpy=={np.__version__}"]
    for wanted in (["--no-deps", f"stable-baselines3=={version}"], beside):
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"{wanted} cannot be installed here: {done.stderr.strip()[-200:]}")
    source = Path(__file__).parents[3] / "src"
    (theirs / "others.pth").write_text(f"{source}\n{sysconfig.get_path('purelib')}\n")
    return python
