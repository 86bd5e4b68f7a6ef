"""Repair of changes that a signal handler interrupted.

A signal handler may raise between any two instructions. A change that takes several steps therefore registers, before
its first step, an action that undoes the change or completes it. The next call of the memory runs that action first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Repair:
    """The action that the next call runs first if the current change is interrupted.

    An action is idempotent: it gives the same result when it runs several times, or when it was interrupted itself.
    Callers hold the lock of the object that is changed.
    """

    def __init__(self) -> None:
        self._action: Callable[[], None] | None = None
        self.is_pending = bytearray(1)  # 1 while a change is incomplete; C reads this byte

    def begin(self, action: Callable[[], None]) -> None:
        """Register the action that repairs the change that follows. It replaces the previous action."""
        self.is_pending[0] = 1
        self._action = action

    def end(self) -> None:
        """Record that the change is complete."""
        self._action = None
        self.is_pending[0] = 0

    def do(self, action: Callable[[], None]) -> None:
        """Run an action. If it is interrupted, the next call runs it again."""
        self.begin(action)
        action()
        self.end()

    def run(self) -> None:
        """Run the registered action if the previous change was interrupted."""
        if self.is_pending[0]:
            if self._action is not None:
                self._action()
            self.end()

    @staticmethod
    def restoring(*targets: object) -> Callable[[], None]:
        """Return an action that resets every attribute of `targets` to its current value.

        Lists, dicts, sets and deques are copied, but not their elements: a change has to replace an element instead of
        writing to it.
        """
        containers = (list, dict, set, deque)
        saved = [
            (vars(target), {k: v.copy() if isinstance(v, containers) else v for k, v in vars(target).items()})
            for target in targets
        ]

        def restore() -> None:
            for attributes, values in saved:
                attributes.update(values)

        return restore
