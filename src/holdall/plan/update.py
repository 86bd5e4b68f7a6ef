"""A few real updates at the real batch size: what they take, measured.

In:  a spec and a number of steps.  Out: peaks by phase, and what of them the buffer's filled rows were.
The buffer is the real one, but only as full as the steps make it; its pages beyond cost nothing.
"""

from __future__ import annotations

from typing import Any

import psutil

from holdall.machine import begin_peak, held_bytes, peak_bytes
from holdall.plan.algorithm import build_model, make_env
from holdall.plan.spec import Spec

_UPDATES = 40
_BATCHES = 3
"""Batches in a shortened rollout."""
_ROLLOUTS = 3


def measured(spec: Spec, steps: int) -> dict[str, Any]:
    """Collect, train, and read the peaks."""
    short = shortened(spec)
    env = make_env(short, real=True)
    begin_peak()
    model = build_model(short, env=env)
    found: dict[str, Any] = {"constructed": peak_bytes()}
    rows = (_on_policy if spec.on_policy else _off_policy)(model, short, steps)
    found["trained"] = peak_bytes()
    found["buffer_bytes"] = short.layout().resident_bytes(rows)
    found["processes"] = _children()
    env.close()
    return found


def shortened(spec: Spec) -> Spec:
    """Return the same run with rollouts of a few batches: an update sees one batch at a time."""
    if not spec.on_policy or spec.algorithm.batch_size is None:
        return spec
    steps = -(-_BATCHES * spec.batch // spec.num_envs)
    return spec.but(n_steps=min(spec.rollout_steps, steps))


def _on_policy(model: Any, spec: Spec, steps: int) -> int:
    rollout = spec.rollout_steps * spec.num_envs
    model.learn(_ROLLOUTS * rollout)
    return rollout


def _off_policy(model: Any, spec: Spec, steps: int) -> int:
    warm = max(steps, spec.num_envs)
    model.learning_starts = warm + 1
    model.learn(warm)
    model.learning_starts = 0
    model.learn(_UPDATES * spec.num_envs, reset_num_timesteps=False)
    return warm + _UPDATES * spec.num_envs


def _children() -> list[dict[str, int]]:
    """Read what the processes of the vector environment hold, the fork server among them."""
    found = []
    for child in psutil.Process().children(recursive=True):
        held = held_bytes(child.pid)
        found.append({"unique": held.unique, "proportional": held.proportional, "resident": held.resident})
    return found
