"""The watcher beside a training: `python -m holdall.watch.beside PID`, started by `holdall.watch.start`.

In:  the id of the process that started it.  Out: its newest reading in the private folder, a record if one is wanted.
It ends with the process that it watches.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import psutil

from holdall.errors import WatchError
from holdall.watch.exposition import Exposition
from holdall.watch.newest import publish
from holdall.watch.record import Recorder, header
from holdall.watch.turn import Turns


def main() -> None:
    """Read the command line, and watch until the process ends."""
    parser = argparse.ArgumentParser(prog="python -m holdall.watch.beside")
    parser.add_argument("pid", type=int)
    parser.add_argument("--interval", type=float, default=2.0)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--prometheus", type=int)
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--limit", type=int)
    wanted = parser.parse_args()
    turns = Turns(wanted.pid, wanted.interval, wanted.limit)
    recorder = None
    if wanted.record is not None:
        recorder = Recorder(wanted.record, header(wanted.pid, psutil.Process(wanted.pid).cmdline(), wanted.interval))
    exposition = None if wanted.prometheus is None else Exposition(wanted.prometheus, wanted.bind)
    while turns.watcher.is_alive():
        try:
            turn = turns.take()
        except WatchError:
            break
        with contextlib.suppress(OSError):
            publish(wanted.pid, turn)
        if recorder is not None:
            recorder.show(turn)
        if exposition is not None:
            exposition.show(turn)
        turns.pause()


if __name__ == "__main__":
    main()
