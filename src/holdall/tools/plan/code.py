"""The lines of Python that a plan writes for its reader to paste."""

from __future__ import annotations

import json
from typing import Any

from holdall.tools.plan.measured import find_main_buffer, find_memory
from holdall.tools.plan.needs import HoldallUse, RunNeeds
from holdall.tools.probe.snapshot import FoundModel, Snapshot
from holdall.units import format_bytes

_MAX_COLUMNS = 80


def write_code(snapshot: Snapshot, needs: RunNeeds) -> str:
    """Return the lines to paste, at most 80 characters wide where that is possible."""
    if not snapshot.models:
        return _write_buffer_code(snapshot, needs)
    model = snapshot.models[0]
    has_batch = bool(model.settings.get("batch_size"))
    is_her = "Her" in str(model.settings.get("replay_buffer_class", ""))
    return write_model_code(model.algorithm, name_policy(model), needs, has_batch=has_batch, is_her=is_her)


def write_model_code(
    algorithm: str, policy: str, needs: RunNeeds, *, has_batch: bool = True, is_her: bool = False
) -> str:
    """Return the lines that make a model of Stable-Baselines3 with the run's buffer."""
    experience = needs.experience
    use = needs.holdall
    settings = [f"n_steps={experience.rows}" if experience.is_rollout else f"buffer_size={experience.size:_}"]
    if needs.batch_size and has_batch:
        settings.append(f"batch_size={needs.batch_size}")
    lines = []
    last = []
    if use is not None and algorithm == "RecurrentPPO":  # It has no argument for the class of its buffer.
        lines.append("from holdall.sb3.contrib import equip")
        last.append("equip(model)")
    elif use is not None:
        kind = "rollout" if experience.is_rollout else "replay"
        name = "HerReplayBuffer" if is_her else f"{kind.title()}Buffer"
        module = "holdall.sb3"
        if algorithm == "MaskablePPO":
            module = "holdall.sb3.contrib"
            name = "MaskableDictRolloutBuffer" if policy == "MultiInputPolicy" else "MaskableRolloutBuffer"
        lines.append(f"from {module} import {name}")
        settings.append(f"{kind}_buffer_class={name}")
        kwargs = _write_use(use) if kind == "replay" else {}
        if kwargs:
            text = ", ".join(f'"{name}": {_write_value(value)}' for name, value in kwargs.items())
            settings.append(f"replay_buffer_kwargs={{{text}}}")
    policy = json.dumps(policy)
    line = f"model = {algorithm}({', '.join([policy, 'env', *settings])})"
    if len(line) > _MAX_COLUMNS:
        arguments = [f"{policy}, env", *settings]
        line = "\n    ".join([f"model = {algorithm}(", *(f"{part}," for part in arguments)]) + "\n)"
    return "\n".join([*lines, line, *last])


def _write_use(use: HoldallUse) -> dict[str, Any]:
    """Return the keyword arguments that give holdall's memory these settings."""
    if use.is_auto:
        return {}
    if use.budget_bytes is None:
        return {"budget": None} if use.prefer == "balanced" else {"budget": None, "prefer": use.prefer}
    kwargs: dict[str, Any] = {"budget": format_bytes(use.budget_bytes), "prefer": use.prefer}
    if use.spill_dir is not None:
        kwargs["spill_dir"] = use.spill_dir
    return kwargs


def _write_value(value: Any) -> str:
    """Return a text, a number or None as Python code."""
    return "None" if value is None else json.dumps(value)


def _write_buffer_code(snapshot: Snapshot, needs: RunNeeds) -> str:
    """Return the lines that make a buffer of a loop without a model."""
    experience = needs.experience
    use = needs.holdall
    if use is None:
        return f"# {experience.name}: a capacity of {experience.size:,}"
    found = find_memory(snapshot, None) or find_main_buffer(snapshot, None)
    library = "" if found is None else found.class_name
    settings = {} if experience.is_rollout else _write_use(use)
    written = [f"{name}={_write_value(value)}" for name, value in settings.items()]
    if library.startswith(("torchrl.", "holdall.torchrl.")):
        settings_text = ", ".join([f"{experience.size:_}", *written])
        return f"from holdall.torchrl import HoldallStorage\nstorage = HoldallStorage({settings_text})"
    if library.startswith(("stable_baselines3.", "cleanrl_utils.", "holdall.cleanrl.")) and not experience.is_rollout:
        lines = ["from holdall.cleanrl import ReplayBuffer", f"{experience.name} = ReplayBuffer("]
        arguments = [f"{experience.size:_},", "...,  # the other arguments stay", *(f"{one}," for one in written)]
        return "\n    ".join(["\n".join(lines), *arguments]) + "\n)"
    kind = "RolloutMemory" if experience.is_rollout else "ReplayMemory"
    size = f"num_steps={experience.rows}" if experience.is_rollout else f"capacity={experience.size:_}"
    arguments = ["observation_space", "action_space", size, f"num_envs={experience.n_envs}", *written]
    return "\n    ".join([f"memory = holdall.{kind}(", *(f"{one}," for one in arguments)]) + "\n)"


def name_policy(model: FoundModel) -> str:
    """Return the policy as users write it."""
    space = model.observation_space or {}
    if space.get("kind") == "dict":
        name = "MultiInputPolicy"
    else:
        name = "CnnPolicy" if "Cnn" in model.policy_class or len(space.get("shape", ())) == 3 else "MlpPolicy"
    return name.replace("Policy", "LstmPolicy") if model.algorithm == "RecurrentPPO" else name
