"""`holdall watch --ray`: every memory that runs on a Ray cluster, shard by shard."""

import os
from pathlib import Path

from holdall.cli.watch_outputs import outputs_of
from holdall.cli.watch_ray_view import cluster_view
from holdall.cluster.token import use_token
from holdall.errors import ArgumentError, MissingPackageError

_QUIET = {
    "RAY_LOG_TO_DRIVER": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "5",  # seconds in which a head has to answer, and not 20
}
"""What Ray reads when it is imported: the terminal belongs to the view."""

_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.5, 5.0
"""How long shards may take to answer; they are asked anew when the next turn is due."""


def watch_ray(
    target: list[str],
    once: bool,
    interval: float,
    json: bool,
    record: Path | None,
    prometheus: int | None,
    bind: str,
) -> None:
    """Watch a cluster until interrupted."""
    if len(target) > 1:
        raise ArgumentError(f"TARGET ({' '.join(target)}) is no address; name host and port of Ray's head, or nothing")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    use_token(os.environ)
    try:
        from holdall.cluster.status import Survey  # noqa: PLC0415  an extra
        from holdall.cluster.watch import ClusterTurns  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingPackageError("--ray needs ray; run \"pip install 'holdall[ray]'\"") from error
    survey = Survey(target[0] if target else None, min(max(interval, _LEAST_PATIENCE_S), _MOST_PATIENCE_S))
    turns = ClusterTurns(survey, interval)
    outputs = outputs_of(
        turns.header(),
        lambda turn, width: cluster_view(turn, turns.history, width),
        once,
        json,
        record,
        prometheus,
        bind,
    )
    try:
        while True:
            turn = turns.take()
            for output in outputs:
                output.show(turn)
            if once:
                break
            turns.pause()
    except KeyboardInterrupt:
        pass
    finally:
        for output in outputs:
            output.close()
        survey.close()
