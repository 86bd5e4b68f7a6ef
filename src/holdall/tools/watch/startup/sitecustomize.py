"""Run the user's own sitecustomize, then start an agent in a Python that `holdall watch -- command` launched.

If anything fails here, the command runs as if it were not watched.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _start_agent() -> None:
    # Workers of the watched process must not see the variable: the watcher reads their memory from outside.
    if os.environ.pop("HOLDALL_WATCHED", None) is not None:
        with contextlib.suppress(Exception):
            from holdall.tools.watch.launch import start_agent_in_command  # noqa: PLC0415  Not before it is needed.

            start_agent_in_command()


def _run_next_sitecustomize() -> None:
    """Remove this folder from the search path, and run the sitecustomize that Python finds without it."""
    here = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != here]
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_run_next_sitecustomize()
_start_agent()
