"""The interpreter and the libraries, as they are on this machine.

In:  a spec.  Out: what a process holds after the imports, and after a real update of a tiny network.
The first optimizer alone imports hundreds of modules: only an update shows what training really loads.
"""

from __future__ import annotations

import subprocess
from typing import Any

from holdall.machine import begin_peak, held_bytes
from holdall.plan.spec import Spec

_TINY_IMAGE = (36, 36, 1)
_TINY_BATCH = 4


def measured(spec: Spec, networks: bool) -> dict[str, Any]:
    """Import what the run imports, make a tiny update, and trace the real one."""
    before = held_bytes()
    free_before = _free_vram() if spec.device.startswith("cuda") else None
    from holdall.plan import algorithm  # noqa: PLC0415 what this import takes is the figure

    imported = held_bytes()
    found: dict[str, Any] = {
        "interpreter": before.resident,
        "imported": imported.resident,
        "imported_anonymous": imported.anonymous,
    }
    if not networks:
        return found
    tiny = algorithm.build_model(_tiny(spec), capacity=2 * _TINY_BATCH)
    begin_peak()
    algorithm.fill_without_writing(tiny)
    for _ in range(2):
        if spec.on_policy:
            tiny.train()
        else:
            tiny.train(gradient_steps=1, batch_size=_TINY_BATCH)
    found["updated"] = held_bytes().resident
    if free_before is not None:
        found["vram"] = _vram(free_before)
    from holdall.plan.trace import traced_bytes  # noqa: PLC0415 it would count among the libraries

    # Everything that an update holds grows with the batch in a straight line, so two batches give the line.
    twice = spec.but(batch_size=2 * spec.batch, n_steps=2 * spec.rollout_steps if spec.on_policy else spec.n_steps)
    found["traced"] = {"batch": spec.batch, "once": list(traced_bytes(spec)), "twice": list(traced_bytes(twice))}
    return found


def _tiny(spec: Spec) -> Spec:
    """Return a run of the same algorithm whose networks are next to nothing."""
    import numpy as np  # noqa: PLC0415
    from gymnasium import spaces  # noqa: PLC0415 numpy alone is loaded so far

    convolves = spec.policy_name != "MlpPolicy"
    image, vector = spaces.Box(0, 255, _TINY_IMAGE, np.uint8), spaces.Box(-1, 1, (3,), np.float32)
    steps = _TINY_BATCH if spec.on_policy else 0
    return Spec(
        spec.algo,
        image if convolves else vector,
        spec.action,
        batch_size=_TINY_BATCH,
        device=spec.device,
        n_steps=steps,
    )


def _free_vram() -> int | None:
    """Read what is free on the first GPU before this process uses it."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return int(done.stdout.split()[0]) * 2**20
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def _vram(free_before: int) -> dict[str, int]:
    """Read what the GPU has, and what this process takes of it beside torch's own pool."""
    import torch  # noqa: PLC0415

    free, total = torch.cuda.mem_get_info()
    context = free_before - free - torch.cuda.memory_reserved()
    return {"free": free_before, "total": total, "context": max(context, 0)}
