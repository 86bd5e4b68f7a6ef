"""A real Chromium, driven through its DevTools protocol over two pipes: no port, no driver, no package.

In:  a path to a page, a width, a theme.  Out: what the page did: its console, its requests, what JavaScript answers.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
_TIMEOUT_S = 60
_KEYS = {"Tab": 9, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "Enter": 13}


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One process, in which pages are opened one after the other."""

    def __init__(self, path: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="holdall-chromium-", ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # Chromium reads commands from 3 and writes to 4. No end of a pipe may have these numbers already.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 64) for end in (theirs_in, theirs_out)]
        moves = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
        moves += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]  # type: ignore[misc]  # two kinds
        arguments = [path, *_FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._pid = os.posix_spawn(path, arguments, dict(os.environ), file_actions=moves, setpgroup=0)
        for end in (theirs_in, theirs_out, *high):
            os.close(end)
        self._in = ours_in
        self._out = ours_out
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._in, selectors.EVENT_READ)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End the process and all of its children."""
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._selector.close()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def command(self, method: str, session: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. Events before the answer are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def wait_for(self, method: str, session: str) -> None:
        """Wait for an event."""
        while not any(event.get("method") == method and event.get("sessionId") == session for event in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        ends = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._buffer:
            if not self._selector.select(ends - time.monotonic()):
                raise TimeoutError("Chromium does not answer")
            received = os.read(self._in, 1 << 20)
            if not received:
                raise RuntimeError("Chromium ended")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


class Page:
    """One page in a browser, closed with `close`."""

    def __init__(self, browser: Browser, path: Path, width: int = 1200, *, dark: bool = False) -> None:
        self._browser = browser
        browser.events.clear()
        # A page must not see what another page stored, such as the chosen theme.
        self._context = browser.command("Target.createBrowserContext")["browserContextId"]
        own = {"url": "about:blank", "browserContextId": self._context}
        self._target = browser.command("Target.createTarget", **own)["targetId"]
        attached = browser.command("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[theme])
        self.url = path.absolute().as_uri()
        self.send("Page.navigate", url=self.url)
        browser.wait_for("Page.loadEventFired", self._session)

    def close(self) -> None:
        """Close the page."""
        self._browser.command("Target.disposeBrowserContext", browserContextId=self._context)

    def send(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Send a command to this page."""
        return self._browser.command(method, self._session, **arguments)

    def ask(self, expression: str) -> Any:
        """Evaluate JavaScript and return its value."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, as a person would."""
        code = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        self.send("Input.dispatchKeyEvent", type="rawKeyDown", **code)
        self.send("Input.dispatchKeyEvent", type="keyUp", **code)

    def point(self, selector: str, share: float = 0.5, number: int = 0) -> None:
        """Move the pointer over an element, `share` of its width from its left."""
        box = self.ask(
            f"(() => {{ const found = document.querySelectorAll({json.dumps(selector)})[{number}];"
            "found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();"
            "return [box.left, box.top, box.width, box.height] })()"
        )
        x = box[0] + share * box[2]
        y = box[1] + box[3] / 2
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tip(self) -> str | None:
        """Return the text of the tooltip, if one is shown."""
        shown = self.ask(
            "(() => { const tip = document.getElementById('tip'); return tip.hidden ? null : tip.innerText })()"
        )
        return None if shown is None else str(shown)

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and what the content policy forbade."""
        self.ask("0")  # All earlier messages arrive before the answer.
        problems = []
        for event in self._mine():
            method = event.get("method")
            what = event.get("params", {})
            if method == "Runtime.exceptionThrown":
                problems.append(str(what["exceptionDetails"]))
            elif method == "Log.entryAdded":
                problems.append(str(what["entry"]["text"]))
            elif method == "Runtime.consoleAPICalled":
                problems.append(str(what["args"]))
        return problems

    @property
    def requests(self) -> list[str]:
        """Everything that was requested, except the page itself and `data:` URLs in it."""
        self.ask("0")
        sent = [
            event["params"]["request"]["url"]
            for event in self._mine()
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in sent if url != self.url and not url.startswith("data:")]

    def _mine(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]
