"""Questions to a throwaway process, so that what it imports, allocates and breaks is gone with it.

In:  a task and its arguments.  Out: the answer, or a HoldallError.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from holdall.errors import ArgumentError, HoldallError
from holdall.plan.spec import Spec


class TrialError(HoldallError, RuntimeError):
    """A trial in a process of its own did not end well."""


def ask(task: str, *, timeout_s: float = 600, **arguments: Any) -> dict[str, Any]:
    """Run one task of `trial` and return its answer."""
    plain = {name: value.as_dict() if isinstance(value, Spec) else value for name, value in arguments.items()}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "holdall.plan.trial"],
            input=json.dumps({"task": task} | plain),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            # Threads that spin while they wait take the cores from who waits for the answer.
            env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
        )
    except subprocess.TimeoutExpired as error:
        raise TrialError(
            f"the trial of {task} took more than {timeout_s:.0f} s; ask for fewer --probe steps"
        ) from error
    try:
        reply = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        killed = f"was killed by signal {-done.returncode}" if done.returncode < 0 else "failed"
        raise TrialError(f"the trial of {task} {killed}: {last}") from None
    if "error" in reply:
        raise ArgumentError(reply["error"])
    answer: dict[str, Any] = reply["answer"]
    return answer
