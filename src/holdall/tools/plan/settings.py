"""The settings that describe a run to plan, in one table.

The command line, files, `--set` and the stand-in take names, checks and help texts from `SETTINGS`. A new setting is a
row of this table and an option of `cli/plan.py`. If it changes the model, `stand_in.build_model` uses it; if `--set`
can change it, `planner.change_needs` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from holdall.errors import ArgumentError

SettingKind = Literal["count", "text", "flag", "table", "space", "size"]
"""`space` and `size` are kept as they are written. The functions that use them parse and check them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a run to plan."""

    name: str
    """Key in a file and in Python. The option has this name with dashes, unless `option` is set."""
    kind: SettingKind
    help: str
    other_names: tuple[str, ...] = ()
    """Names of Stable-Baselines3 and rl-zoo for this setting, which files and `--set` accept, too."""
    choices: tuple[str, ...] = ()
    """Allowed texts, the default first. Without choices, every text is allowed here."""
    option: str = ""
    can_change: bool = False
    """Whether `--set` can change it after the run was measured."""

    @property
    def option_name(self) -> str:
        """Name on the command line."""
        return self.option or "--" + self.name.replace("_", "-")

    @property
    def names(self) -> tuple[str, ...]:
        """All names that files and `--set` accept."""
        return (self.name, *self.other_names)


_ROWS = (
    Setting("name", "text", "Name of the run, for the title of the plan."),
    Setting("obs", "space", "[NAME=]84x84x3:uint8, 31, discrete(4); repeat for a Dict."),
    Setting("action", "space", "8 for eight numbers, discrete(4) for four choices."),
    Setting("algo", "text", "dqn, ddpg, td3, sac, ppo, a2c, or one of sb3-contrib."),
    Setting(
        "capacity",
        "count",
        "Transitions of the replay buffer, as in 1e6.",
        other_names=("buffer_size",),
        can_change=True,
    ),
    Setting("num_envs", "count", "Environments that step together.", other_names=("n_envs",), can_change=True),
    Setting("n_steps", "count", "Steps of a rollout.", can_change=True),
    Setting("batch_size", "count", "Transitions in one update.", can_change=True),
    Setting("policy", "text", "MlpPolicy, CnnPolicy or MultiInputPolicy."),
    Setting("policy_kwargs", "table", "Hidden layers, as in 256,256.", option="--net-arch"),
    Setting("vec_env", "text", "dummy or subproc.", choices=("dummy", "subproc")),
    Setting("start_method", "text", "fork, forkserver or spawn.", choices=("", "fork", "forkserver", "spawn")),
    Setting("device", "text", "cpu or cuda."),
    Setting(
        "total_timesteps",
        "count",
        "Steps of the whole run, which may be too few to fill the buffer.",
        other_names=("n_timesteps", "timesteps"),
        option="--timesteps",
        can_change=True,
    ),
    Setting("frame_stack", "count", "Number of observations that are stacked into one."),
    Setting("uses_holdall", "flag", "The run uses holdall's buffer.", option="--holdall"),
    Setting("env", "text", "Environment, by its ID or as module:Class."),
    Setting("wrapper", "text", "atari: Stable-Baselines3's AtariWrapper.", choices=("", "atari")),
    Setting("budget", "size", 'A further limit, as in "8GiB" or "16 GB".'),
    Setting("memory", "size", "Free memory of another machine, in place of this one's."),
    Setting("vram", "size", "Free memory of a GPU. Without it, the GPU is not checked."),
)
SETTINGS = {setting.name: setting for setting in _ROWS}
"""All settings by name."""
_BY_ANY_NAME = {name: setting for setting in _ROWS for name in setting.names}


def find_setting(name: str) -> Setting | None:
    """Return the setting with this name, also if it is the name that Stable-Baselines3 uses."""
    return _BY_ANY_NAME.get(name)


def list_changeable() -> str:
    """Return the names that `--set` accepts, in words."""
    return ", ".join(" or ".join(setting.names[:2]) for setting in _ROWS if setting.can_change)


def parse_count(value: Any, argument: str) -> int:
    """Return a whole number that is written as 400000, 4e5, 400_000 or 400,000."""
    try:
        number = float(str(value).replace("_", "").replace(",", ""))
    except ValueError:
        number = float("nan")
    if isinstance(value, bool) or not number.is_integer():
        raise ArgumentError(f"{argument} ({value!r}) must be a whole number, as in 400000, 4e5 or 400_000.")
    return int(number)


def check_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given settings, each as a value of its kind. Raise ArgumentError for a value of another kind."""
    return {name: _check_value(SETTINGS[name], value) for name, value in given.items()}


def _check_value(setting: Setting, value: Any) -> Any:
    """Return the value of one setting. Stable-Baselines3 refuses other invalid values when it gets them."""
    name = setting.name
    if setting.kind == "count":
        count = parse_count(value, name)
        if count < 1:
            raise ArgumentError(f"{name} ({count}) must be at least 1.")
        return count
    if setting.kind == "text":
        text = str(value)
        if setting.choices and text not in setting.choices:
            raise ArgumentError(f"{name} ({text!r}) must be one of {', '.join(filter(None, setting.choices))}.")
        return text
    if setting.kind == "flag" and not isinstance(value, bool):
        raise ArgumentError(f"{name} ({value!r}) must be true or false.")
    if setting.kind == "table" and not isinstance(value, Mapping):
        raise ArgumentError(f"{name} ({value!r}) must be a table, such as net_arch = [256, 256].")
    return value
