"""Where an actor is, as far as Ray told this process: at once, and without a question.

What tells is no part of Ray's promised interface, so it is read here alone; without it everybody counts as up, and a
loss is noticed when calls fail, two seconds later.
"""

from __future__ import annotations

from typing import Any, Literal

Whereabouts = Literal["up", "starting", "restarting", "gone"]

_STATES: dict[Any, Whereabouts] = {0: "starting", 1: "starting", 3: "restarting", 4: "gone"}
"""By the numbers of Ray's ActorTableData; 2 is an actor that runs."""


def whereabouts(handle: Any) -> Whereabouts:
    """Return where the actor of a handle is."""
    return _STATES.get(getattr(handle, "_get_local_state", lambda: None)(), "up")
