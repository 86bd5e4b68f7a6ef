"""Measurements in a throwaway process: what it imports, allocates and breaks is gone with it.

`run_probe` starts `python -m holdall.tools.plan.subprocess_probe`, sends one JSON object on stdin,
{"task": ..., ...}, and reads one from stdout, {"answer": ...} or {"error": ...}. What libraries print goes to stderr.
Invariant: importing this module imports neither torch nor Stable-Baselines3; what importing them takes is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall.errors import ArgumentError, HoldallError
from holdall.machine import begin_peak, held_bytes, memory_limits
from holdall.tools.plan.environments import measure_environment
from holdall.tools.plan.phases import MAPPED_FROM, UpdateBytes
from holdall.tools.plan.spec import Spec
from holdall.tools.watch.allocators import map_blocks_from

_TINY_IMAGE = (36, 36, 1)
_TINY_BATCH = 4
_REAL_BYTES = 48 * 2**20  # of activations in real updates; more take too long
_MOST_REAL_BYTES = 2**29  # of weights, gradients and optimizer


class ProbeError(HoldallError, RuntimeError):
    """A measurement in a process of its own failed."""


def run_probe(task: str, *, timeout_s: float = 600, **arguments: Any) -> dict[str, Any]:
    """Run one task in a throwaway process and return its answer."""
    plain = {name: value.as_dict() if isinstance(value, Spec) else value for name, value in arguments.items()}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "holdall.tools.plan.subprocess_probe"],
            input=json.dumps({"task": task} | plain),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            # Threads that spin while they wait take the cores from who waits for the answer.
            env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(
            f"the measurement ({task}) took more than {timeout_s:.0f} s; ask for fewer --probe steps"
        ) from error
    try:
        reply = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        killed = f"was killed by signal {-done.returncode}" if done.returncode < 0 else "failed"
        raise ProbeError(f"the measurement ({task}) {killed}: {last}") from None
    if "error" in reply:
        raise ArgumentError(reply["error"])
    answer: dict[str, Any] = reply["answer"]
    return answer


def measure_baseline(spec: Spec, networks: bool) -> dict[str, Any]:
    """Import what the run imports, make a tiny update, and trace the real one."""
    before = held_bytes()
    free_before = _free_vram() if spec.device.startswith("cuda") else None
    from holdall.tools.plan import sb3_model  # noqa: PLC0415 what this import takes is the figure

    imported = held_bytes()
    found: dict[str, Any] = {
        "interpreter": before.resident,
        "imported": imported.resident,
        "imported_anonymous": imported.anonymous,
    }
    if not networks:
        return found
    tiny = sb3_model.build_model(_tiny_spec(spec), capacity=2 * _TINY_BATCH)
    begin_peak()
    sb3_model.fill_without_writing(tiny)
    for _ in range(2):
        tiny.train(**({} if spec.on_policy else {"gradient_steps": 1, "batch_size": _TINY_BATCH}))
    del tiny  # a network of many quantiles is not so tiny
    sb3_model.give_back_free_memory()
    found["updated"] = held_bytes().resident
    if free_before is not None:
        found["vram"] = _context_bytes(free_before)
    # Everything that an update holds grows with the batch in a straight line, so two batches give the line.
    twice = spec.but(batch_size=2 * spec.batch, n_steps=2 * spec.rollout_steps if spec.on_policy else spec.n_steps)
    once, twice_ = sb3_model.trace_update(spec), sb3_model.trace_update(twice)
    found["traced"] = {"batch": spec.batch, "once": list(once), "twice": list(twice_)}
    batch = _real_batch(spec.batch, once)
    if batch and spec.device == "cpu":
        smaller = {"batch_size": batch} | ({"n_steps": batch, "num_envs": 1} if spec.on_policy else {})
        real = spec if batch == spec.batch else spec.but(**smaller)
        traced = once if batch == spec.batch else sb3_model.trace_update(real, _mapped_from(batch / spec.batch))
        grown, found["kept"] = sb3_model.measure_growth(real)
        found["growth"] = [batch, grown, list(traced)]
    return found


def _mapped_from(share: float) -> int:
    """Let the C library map blocks on their own that are larger than this share of its threshold, and return that.

    The heap of a smaller batch is then made of the blocks that the heap of the real one is made of, each smaller by
    the same share.
    """
    nbytes = int(share * MAPPED_FROM)
    return nbytes if map_blocks_from(nbytes) else MAPPED_FROM


def _real_batch(batch: int, traced: UpdateBytes) -> int:
    """Return how large a batch real updates are made with: no larger than needed, quick, and small; 0: none."""
    if traced.settled > min(_MOST_REAL_BYTES, memory_limits()[0].free_bytes // 4):
        return 0
    share = _REAL_BYTES / max(traced.live - traced.settled, 1)
    return max(int(batch * min(share, 1)), _TINY_BATCH)


def _tiny_spec(spec: Spec) -> Spec:
    """Return a run of the same algorithm whose networks are next to nothing."""
    image, vector = spaces.Box(0, 255, _TINY_IMAGE, np.uint8), spaces.Box(-1, 1, (3,), np.float32)
    steps, seen = _TINY_BATCH if spec.on_policy else 0, vector if spec.policy_name == "MlpPolicy" else image
    return Spec(spec.algo, seen, spec.action, batch_size=_TINY_BATCH, device=spec.device, n_steps=steps)


def _free_vram() -> int | None:
    """Read what is free on the first GPU before this process uses it."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return int(done.stdout.split()[0]) * 2**20
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def _context_bytes(free_before: int) -> dict[str, int]:
    """Read what the GPU has, and what this process takes of it beside torch's own pool."""
    import torch  # noqa: PLC0415

    free, total = torch.cuda.mem_get_info()
    context = free_before - free - torch.cuda.memory_reserved()
    return {"free": free_before, "total": total, "context": max(context, 0)}


def run_task(question: dict[str, Any]) -> dict[str, Any]:
    """Do one task; each imports only what it needs, because imports are part of what is measured."""
    task = question["task"]
    if task == "environment":
        return measure_environment(question["env_id"], question["wrapper"], question["with_torch"])
    spec = Spec.from_dict(question["spec"])
    if task == "baseline":
        return measure_baseline(spec, question["networks"])
    if task == "update":
        from holdall.tools.plan.sb3_model import measure_updates  # noqa: PLC0415

        return measure_updates(spec, question["steps"])
    from holdall.tools.plan.measure_memory import measure_need  # noqa: PLC0415

    return measure_need(spec, question["steps"], question["prefer"])


def main() -> None:
    """Answer one question."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # an environment's warnings are its user's affair, at training
    try:
        reply: dict[str, Any] = {"answer": run_task(json.load(sys.stdin))}
    except HoldallError as error:
        reply = {"error": str(error)}
    except ModuleNotFoundError as error:
        reply = {"error": f"{error}; install it, and Stable-Baselines3 with pip install 'holdall[sb3]'"}
    results.write(json.dumps(reply))
    results.close()


if __name__ == "__main__":
    main()
