"""GPU memory, planned against measured: `python benchmarks/plan_gpu.py`, on a machine with a CUDA device.

Each configuration makes real updates in a process of its own. Out: a table of what was planned, of the most that torch
had in use and kept in its pool, and of what the process took beside that pool.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from holdall.tools.plan.config import spec_from_settings
from holdall.tools.plan.phases import MeasuredCosts, UpdateBytes, vram_phases
from holdall.tools.plan.spec import Spec

_ROVER = {"image": "84x84x3:uint8", "vector": "31"}
_GAME = {"obs": "144x160x12:uint8", "action": "discrete(8)"}
_ATARI = {"obs": "84x84x4:uint8", "action": "discrete(8)"}
RUNS: list[dict[str, Any]] = [
    {"algo": "ppo", "obs": "17", "action": "discrete(8)", "batch_size": 64, "n_steps": 64},
    {"algo": "ppo", **_ATARI, "batch_size": 256, "n_steps": 256},
    {"algo": "ppo", **_ATARI, "batch_size": 2048, "n_steps": 2048},
    {"algo": "ppo", **_GAME, "batch_size": 256, "n_steps": 256},
    {"algo": "ppo", **_GAME, "batch_size": 2048, "n_steps": 2048},
    {"algo": "sac", "obs": _ROVER, "action": 8},
    {"algo": "sac", "obs": "17", "action": 8},
    {"algo": "dqn", **_ATARI},
    {"algo": "dqn", **_ATARI, "batch_size": 512},
]
_UPDATES = 4
_MIB = 2**20


def update(spec: Spec) -> dict[str, int]:
    """Make real updates in this process, and read what the GPU gave."""
    import torch  # noqa: PLC0415 only a process that trains needs it

    from holdall.tools.plan.sb3_model import build_model, fill_without_writing  # noqa: PLC0415 as above

    model = build_model(spec, capacity=spec.batch)
    for _ in range(_UPDATES):
        fill_without_writing(model)
        if spec.on_policy:
            model.train()
        else:
            model.train(gradient_steps=1, batch_size=spec.batch)
    return {"used": torch.cuda.max_memory_allocated(), "kept": torch.cuda.max_memory_reserved()}


def ask(what: str, spec: Spec) -> dict[str, Any]:
    """Run one of the two in a process of its own."""
    command = [sys.executable, __file__, what]
    done = subprocess.run(command, input=json.dumps(spec.as_dict()), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Compare all configurations."""
    if len(sys.argv) > 1:
        spec = Spec.from_dict(json.load(sys.stdin))
        from holdall.tools.plan.sb3_model import measure_baseline  # noqa: PLC0415 as above

        print(json.dumps(update(spec) if sys.argv[1] == "update" else measure_baseline(spec, networks=True)))
        return 0
    print("| run | planned, MiB | at most | in use | off by | kept in the pool | context | bound holds |")
    print("|---|---|---|---|---|---|---|---|")
    held = True
    for settings in RUNS:
        spec, _ = spec_from_settings(settings | {"device": "cuda"})
        base, real = ask("base", spec), ask("update", spec)
        traced, context = base["traced"], base["vram"]["context"]
        known = MeasuredCosts(
            traced_batch=traced["batch"],
            traced=UpdateBytes(*traced["once"]),
            traced_twice=UpdateBytes(*traced["twice"]),
            vram_context=context,
        )
        phase = vram_phases(spec, known)[-1]
        used, kept = real["used"] + context, real["kept"] + context
        held = held and phase.most_bytes >= kept
        sizes = [f"{size / _MIB:,.0f}" for size in (phase.nbytes, phase.most_bytes, used)]
        off = f"{100 * (phase.nbytes / used - 1):+.1f} %"
        rest = [f"{size / _MIB:,.0f}" for size in (kept, context)]
        name = f"{spec.algorithm.name}, {spec.policy_name}, batches of {spec.batch}"
        print(
            f"| {' | '.join([name, *sizes, off, *rest])} | {'yes' if phase.most_bytes >= kept else '**no**'} |",
            flush=True,
        )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
