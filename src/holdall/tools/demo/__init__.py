"""The demo: plan, train, watch, checkpoint, kill, resume, and compare with Stable-Baselines3's buffer.

camera.py is the environment, training.py one training in a process of its own, walkthrough.py runs everything. All
names are imported when they are asked for: plan measures what the environment alone takes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdall.tools.demo.camera import VIEW_PX, CameraRover
    from holdall.tools.demo.walkthrough import run_demo, table, verdict

__all__ = ["VIEW_PX", "CameraRover", "run_demo", "table", "verdict"]

_LAZY = {
    "camera": "CameraRover VIEW_PX",
    "walkthrough": "run_demo table verdict",
}


def __getattr__(name: str) -> Any:
    """Import a name's module when it is asked for."""
    for module, names in _LAZY.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
