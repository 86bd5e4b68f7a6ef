"""One run of benchmarks/plan.py: train for real what stands on stdin, and print what it took.

In:  a spec as JSON.  Out: one JSON line.
A script of its own, as users have one: processes that are spawned import it again, and what it imports counts.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import psutil

from holdall.machine import held_bytes, peak_bytes
from holdall.tools.plan.spec import Spec

_UPDATES = 60
_ROLLOUTS = 4


def run(spec: Spec) -> dict[str, Any]:
    """Train for real in this process, and read what it took."""
    from holdall.tools.plan.sb3_model import build_model, make_env  # noqa: PLC0415 workers do not need it

    env = make_env(spec, real=True)
    model = build_model(spec, env=env)
    if spec.on_policy:
        model.learn(_ROLLOUTS * spec.rollout_steps * spec.num_envs)
    else:
        model.learning_starts = spec.capacity + spec.num_envs
        model.learn(spec.capacity)
        model.learning_starts = 0
        model.learn(_UPDATES * spec.num_envs, reset_num_timesteps=False)
    children = [held_bytes(child.pid).unique for child in psutil.Process().children(recursive=True)]
    peak = peak_bytes()
    env.close()
    return {"trainer_bytes": peak, "processes_bytes": sum(children), "measured_bytes": peak + sum(children)}


if __name__ == "__main__":
    print(json.dumps(run(Spec.from_dict(json.load(sys.stdin)))))
