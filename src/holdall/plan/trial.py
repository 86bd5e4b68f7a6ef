"""The throwaway process: `python -m holdall.plan.trial`, a question on stdin, an answer on stdout.

In:  one JSON object, {"task": ..., ...}.  Out: one JSON object, {"answer": ...} or {"error": ...}.
Whatever environments and libraries print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from typing import Any

from holdall.errors import HoldallError
from holdall.plan.spec import Spec


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked; every task imports only what it needs."""
    task = question["task"]
    if task == "environment":
        return _measured("environment", question["env_id"], question["wrapper"], question["with_torch"])
    spec = Spec.from_dict(question["spec"])
    if task == "baseline":
        return _measured("baseline", spec, question["networks"])
    if task == "update":
        return _measured("update", spec, question["steps"])
    return _measured("filling", spec, question["steps"], question["prefer"])


def _measured(module: str, *arguments: Any) -> dict[str, Any]:
    found: dict[str, Any] = importlib.import_module(f"holdall.plan.{module}").measured(*arguments)
    return found


def main() -> None:
    """Answer one question."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # an environment's warnings are its user's affair, at training
    try:
        reply: dict[str, Any] = {"answer": answer(json.load(sys.stdin))}
    except HoldallError as error:
        reply = {"error": str(error)}
    except ModuleNotFoundError as error:
        reply = {"error": f"{error}; install it, and Stable-Baselines3 with pip install 'holdall[sb3]'"}
    results.write(json.dumps(reply))
    results.close()


if __name__ == "__main__":
    main()
