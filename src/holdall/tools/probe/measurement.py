"""Measures the memory of a real update and of a few hundred real steps, in the command's process.

A model of Stable-Baselines3 is measured when it is about to learn: random actions are played in its environments, the
steps are added to its buffer, and `train` runs twice with the real batch size. Other commands continue by themselves to
the end of their first update, and the hook records the experience that they add.

If holdall is installed where the command runs, the steps are then added to memories of holdall, which shows how much
sharing and compression save for this data. The command is stopped afterwards, so the measurement cannot affect it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .snapshot import MeasuredUpdate, StoredSteps

MAX_STEPS = 1000
"""Most transitions that are played, except that `_MIN_TICKS` are always played, and most steps that are copied."""
MAX_COPIED_BYTES = 256 * 2**20
"""Most bytes of copied steps. Steps of many environments with images are large."""
_MIN_TICKS = 4
"""Fewest vectorised steps that are played. `stored.fill_memories` needs as many."""
_UPDATES = 2
_PLAY_SHARE = 0.4
"""Share of the measuring time that is spent on playing in the environments."""
_MAX_BATCH_SHARE = 1 / 32
"""Share of the free memory that the observations of one batch may take as float32. Larger batches are made smaller."""

Step = tuple[Any, Any, Any, Any, Any, Any]
"""obs, action, reward, next_obs, terminated, truncated; leading axis: environments."""


def measure_model(model: Any, measure_s: float) -> dict[str, Any]:
    """Return `update`, `stored` and `notes` of a snapshot, for a model of Stable-Baselines3."""
    facts: dict[str, Any] = {"notes": ()}
    try:
        steps = _play(model, measure_s * _PLAY_SHARE)
    except Exception as error:
        return {"notes": (f"The environments could not be played: {error!r}.",)}
    try:
        facts["update"] = _measure_update(model, steps)
    except Exception as error:
        facts["notes"] += (f"An update could not be measured: {error!r}.",)
    return facts | _store(steps, facts["notes"], is_rollout=hasattr(model, "rollout_buffer"))


def measure_steps(steps: list[Step], resident_bytes: int) -> dict[str, Any]:
    """Return `update`, `stored` and `notes` of a snapshot, for a command that made its first update by itself.

    Args:
        steps: Copies of the steps that the command added.
        resident_bytes: Resident set before the update; 0 if there was no update.
    """
    facts: dict[str, Any] = {"notes": ()}
    if resident_bytes:
        peak = max(read_status("VmHWM") - resident_bytes, 0)
        kept = max(read_status("VmRSS") - resident_bytes, 0)
        facts["update"] = MeasuredUpdate(0, peak, kept, *_read_gpu())
    if not steps:
        return facts | {"notes": ("The added steps could not be read, so holdall's need was not measured.",)}
    return facts | _store(steps, facts["notes"], is_rollout=False)


def read_status(name: str) -> int:
    """Return a figure of /proc/self/status in bytes, or 0 if the file or the figure does not exist."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else 0


# ---------------------------------------------------------------- playing


def _play(model: Any, play_s: float) -> list[Step]:
    """Play random actions in the model's environments. Return the steps as the model's buffer would receive them."""
    import numpy as np  # noqa: PLC0415  Stable-Baselines3 has imported it.

    env = model.env
    normalizer = getattr(model, "_vec_normalize_env", None)

    def copy_raw_observation(obs: Any) -> Any:
        return _copy_arrays(obs if normalizer is None else normalizer.get_original_obs())

    steps: list[Step] = []
    deadline = time.monotonic() + play_s
    obs = copy_raw_observation(env.reset())
    while len(steps) < _MIN_TICKS or (len(steps) * env.num_envs < MAX_STEPS and time.monotonic() < deadline):
        actions = np.array([env.action_space.sample() for _ in range(env.num_envs)])
        returned_obs, rewards, dones, infos = env.step(actions)
        following = copy_raw_observation(returned_obs)
        next_obs = _restore_final_observations(following, dones, infos)
        truncated = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
        ended = np.asarray(dones, bool)
        steps.append((obs, actions, np.asarray(rewards, np.float32), next_obs, ended & ~truncated, ended & truncated))
        obs = following
    return steps


def _restore_final_observations(following: Any, dones: Any, infos: Any) -> Any:
    """Return `following` with the final observations of ended episodes, in place of those after their reset."""
    result = _copy_arrays(following)
    for lane, info in enumerate(infos):
        final = info.get("terminal_observation") if dones[lane] else None
        if final is None:
            continue
        if isinstance(result, dict):
            for key, value in final.items():
                result[key][lane] = value
        else:
            result[lane] = final
    return result


def _copy_arrays(value: Any) -> Any:
    """Return a copy of an array, or of a dict with copies of its arrays."""
    if isinstance(value, dict):
        return {key: _copy_arrays(item) for key, item in value.items()}
    return value.copy() if type(value).__name__ == "ndarray" else value


# ---------------------------------------------------------------- updates


def _measure_update(model: Any, steps: list[Step]) -> MeasuredUpdate:
    """Run the model's own `train` `_UPDATES` times, and return the growth of the process."""
    from stable_baselines3.common.logger import Logger  # noqa: PLC0415  The command has imported it.

    model.set_logger(Logger(None, []))
    model._current_progress_remaining = 1.0
    batch_size = _limit_batch_size(model, steps)
    if hasattr(model, "replay_buffer"):
        for obs, actions, rewards, next_obs, terminated, truncated in steps:
            infos = [{"TimeLimit.truncated": bool(cut)} for cut in truncated]
            ended = terminated | truncated
            model.replay_buffer.add(obs, next_obs, _scale_actions(model, actions), rewards, ended, infos)
        train = _Training(model, batch_size).train_off_policy
    else:
        train = _Training(model, batch_size, steps).train_on_policy
    peak = 0
    before = read_status("VmRSS")
    for _ in range(_UPDATES):
        _reset_peak()
        train()
        peak = max(peak, read_status("VmHWM") - before)
    kept = max(read_status("VmRSS") - before, 0)
    return MeasuredUpdate(batch_size, max(peak, 0), kept, *_read_gpu())


def _scale_actions(model: Any, actions: Any) -> Any:
    """Return actions as the replay buffer stores them: scaled to [-1, 1] if they are continuous."""
    return model.policy.scale_action(actions) if hasattr(model.action_space, "low") else actions


def _limit_batch_size(model: Any, steps: list[Step]) -> int:
    """Return the real batch size, or a smaller one if a batch might not fit in memory."""
    wanted = int(getattr(model, "batch_size", 0) or model.n_steps * model.n_envs)
    obs = steps[0][0]
    arrays = list(obs.values()) if isinstance(obs, dict) else [obs]
    row_bytes = sum(4 * int(array[0].size) for array in arrays)
    free = _read_free_memory()
    largest = max(int(free * _MAX_BATCH_SHARE) // max(row_bytes, 1), 2)
    return min(wanted, largest)


def _read_free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 2**33
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 2**33)


class _Training:
    """Calls the `train` method of a model without `learn`."""

    def __init__(self, model: Any, batch_size: int, steps: list[Step] | None = None) -> None:
        self._model = model
        self._batch_size = batch_size
        self._steps = steps or []

    def train_off_policy(self) -> None:
        """Make one update from the replay buffer."""
        self._model.train(gradient_steps=1, batch_size=self._batch_size)

    def train_on_policy(self) -> None:
        """Make one update from a rollout that consists of one batch."""
        import numpy as np  # noqa: PLC0415  Stable-Baselines3 has imported it.
        import torch  # noqa: PLC0415  Stable-Baselines3 has imported it.

        model = self._model
        n_envs = model.n_envs
        rows = max(math.ceil(self._batch_size / n_envs), 1)
        kind = type(model.rollout_buffer)
        buffer = kind(
            rows,
            model.observation_space,
            model.action_space,
            device=model.device,
            gae_lambda=model.gae_lambda,
            gamma=model.gamma,
            n_envs=n_envs,
        )
        zeros = torch.zeros(n_envs)
        for row in range(rows):
            obs, actions, rewards, *_ = self._steps[row % len(self._steps)]
            buffer.add(obs, actions.reshape(n_envs, -1), rewards, np.zeros(n_envs), zeros, zeros)
        buffer.compute_returns_and_advantage(last_values=zeros, dones=np.zeros(n_envs))
        model.rollout_buffer = buffer
        if hasattr(model, "batch_size"):
            model.batch_size = self._batch_size
            model.n_epochs = 1
        model.train()


def _reset_peak() -> None:
    """Reset the kernel's record of the peak resident set (VmHWM) to the current size."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def _read_gpu() -> tuple[int, int]:
    """Return the peaks of two figures of the GPU: bytes in tensors, and bytes that torch's allocator reserved."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0, 0
    return int(torch.cuda.max_memory_allocated()), int(torch.cuda.max_memory_reserved())


# ---------------------------------------------------------------- storing


def copy_step(method: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Step | None:
    """Return a copy of the step that a call added, or None if the method's arguments are unknown."""
    if options:
        return None
    import numpy as np  # noqa: PLC0415  The command has imported it.

    package = method.__module__.partition(".")[0]
    if method.__name__ == "add" and package in {"stable_baselines3", "cleanrl_utils"} and len(arguments) == 7:
        _, obs, next_obs, action, reward, done, _ = map(_copy_arrays, arguments)
        terminated = np.asarray(done, bool).reshape(-1)
        return obs, action, np.asarray(reward, np.float32).reshape(-1), next_obs, terminated, np.zeros_like(terminated)
    if method.__name__ == "append" and package == "holdall" and len(arguments) >= 7:
        obs, action, reward, next_obs, terminated, truncated = map(_copy_arrays, arguments[1:7])
        return obs, action, reward, next_obs, terminated, truncated
    return None


def count_step_bytes(step: Step) -> int:
    """Return the bytes of a copied step."""
    values = [part for value in step for part in (value.values() if isinstance(value, dict) else [value])]
    return sum(map(sys.getsizeof, values))


def _store(steps: list[Step], notes: tuple[str, ...], *, is_rollout: bool) -> dict[str, Any]:
    """Add the steps to memories of holdall. Return `stored` and `notes` of a snapshot."""
    try:
        from holdall.tools.probe.stored import fill_memories  # noqa: PLC0415  Only where holdall is installed.
    except ImportError:
        return {"notes": (*notes, "holdall's need was not measured, because holdall is not installed for the command.")}
    try:
        stored: StoredSteps = StoredSteps(**fill_memories(steps, is_rollout=is_rollout))
    except Exception as error:
        return {"notes": (*notes, f"The steps could not be stored in a memory of holdall: {error!r}.")}
    return {"stored": stored, "notes": notes}
