"""Begins an agent in a Python that `holdall watch -- command` started, then makes way for the user's own module.

Invariant: whatever goes wrong here, the command runs as if it were not watched.
"""

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _begin() -> None:
    if os.environ.pop("HOLDALL_WATCHED", None) is None:  # workers of a watched process are read from outside
        return
    with contextlib.suppress(Exception):
        from holdall.watch.discover import begin  # noqa: PLC0415  not before it is wanted

        begin()


def _make_way() -> None:
    """Run the start-up module that this one stands before."""
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


_make_way()
_begin()
