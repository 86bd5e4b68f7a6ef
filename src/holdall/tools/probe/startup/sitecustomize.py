"""Start the probe's hook in a Python that `holdall plan -- command` launched, then run the user's own sitecustomize.

If anything fails here, the command runs as if it were not probed. Child processes inherit PYTHONPATH, so they load this
module, too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_STARTUP = Path(__file__).parent


def _run_next_sitecustomize() -> None:
    """Run the user's own sitecustomize module, which this module hides."""
    others = [entry for entry in sys.path if Path(entry or ".").absolute() != _STARTUP]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _start_hook() -> None:
    """Load the modules of the probe under the name `holdall_probe`, and install the triggers."""
    folder = _STARTUP.parent
    spec = importlib.util.spec_from_file_location(
        "holdall_probe", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    sys.modules["holdall_probe"] = package
    spec.loader.exec_module(package)
    importlib.import_module("holdall_probe.hook").install()


if os.environ.get("HOLDALL_PROBE_DIR"):
    with contextlib.suppress(Exception):
        _start_hook()
_run_next_sitecustomize()
