"""Calls to actors: waiting for results, repeating questions, and the states of actors.

Ray never retries a call that changes a shard, because retried calls arrive in any order. A question is a call that may
be executed twice. `ask` repeats it until it is answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import ray

from holdall.cluster.messages import GoneError
from holdall.errors import HoldallError, ShardError

_PAUSE_S = 0.05
"""Seconds before a question is repeated."""
_LOG = logging.getLogger("holdall")


def require_ray() -> None:
    """Raise ShardError after `ray.shutdown()`. Ray would otherwise start a new cluster, without this memory."""
    if not ray.is_initialized():
        raise ShardError(
            "Ray was shut down, and the memory ended with it. Transitions that no shard had acknowledged are lost. "
            "Close the memory before ray.shutdown(), and make a new one."
        )


def get_result(call: Any, timeout_s: float | None = None) -> Any:
    """Wait for the result of a call. Errors of holdall are raised as the actor raised them."""
    try:
        return ray.get(call, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HoldallError):
            raise cause from None
        raise


def ask(question: Callable[[], Any], who: str, patience_s: float, timeout_s: float | None = None) -> Any:
    """Return the answer of an actor. Wait while Ray restarts the actor.

    Args:
        question: Calls the actor and returns Ray's reference to the answer.
        who: Name of the actor for error messages.
        patience_s: Seconds without an answer after which ShardError is raised.
        timeout_s: Seconds that one call may take. None: no limit, for an actor that answers as soon as it runs.

    Raises:
        GoneError: The actor has ended for good.
    """
    end_s = time.monotonic() + patience_s
    was_dead = False
    while True:
        require_ray()
        try:
            return get_result(question(), timeout_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            is_dead = isinstance(error, ray.exceptions.ActorDiedError)
            if is_dead and was_dead:  # The first report may be about the process that Ray is replacing.
                raise GoneError(f"{who} has ended, and Ray does not restart it ({type(error).__name__}).") from error
            was_dead = is_dead
            if isinstance(error, ray.exceptions.GetTimeoutError):
                _LOG.warning("%s does not answer yet. It may read its journal, or Ray has no room to start it.", who)
            if time.monotonic() > end_s:
                raise ShardError(
                    f"{who} did not answer for {max(0.0, patience_s):g} s ({type(error).__name__}). Nothing is lost. "
                    "See `ray status` for room in the cluster, and try again."
                ) from error
        time.sleep(_PAUSE_S)


ActorState = Literal["up", "starting", "restarting", "gone"]

_STATES: dict[Any, ActorState] = {0: "starting", 1: "starting", 3: "restarting", 4: "gone"}
"""States by their number in Ray's ActorTableData. Number 2 is an actor that runs."""


def actor_state(handle: Any) -> ActorState:
    """Return the state of an actor, as far as this process knows. "up" if Ray does not report it."""
    read_state = getattr(handle, "_get_local_state", None)
    return "up" if read_state is None else _STATES.get(read_state(), "up")


def get_machine_id() -> bytes:
    """Return the id that Ray gave to this machine."""
    node: str = ray.get_runtime_context().get_node_id()
    return node.encode()


def get_machine_address() -> str:
    """Return the IP address at which Ray reaches this machine."""
    return str(ray.util.get_node_ip_address())


def read_last_line(error: BaseException | None) -> str:
    """Return the last line of an error's text. Ray writes the cause there, after a traceback."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
