"""A real headless browser for the tests of pages; driven over a pipe, without any package."""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import DEADLINE_S

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_RENDERED = "document.documentElement.dataset.shown !== undefined"
"""True once a page of drivetrain has shown its data."""

_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


# A browser reads commands from descriptor 3, and responds on 4.
_HAND_OVER = """
import os, sys
first, second = os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2]))
os.dup2(first, 3), os.dup2(second, 4)
os.set_inheritable(3, True), os.set_inheritable(4, True)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One tab of a Chromium, controlled through its DevTools protocol."""

    def __init__(self, process: subprocess.Popen[bytes], commands: int, answers: int) -> None:
        self._process = process
        self._commands, self._answers = commands, answers
        self._data = b""
        self._number = self._loads = 0
        self._session: str | None = None
        self.messages: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the browser, and return its response."""
        answer = self._ask(method, parameters)
        assert "error" not in answer, answer
        return answer["result"]

    def _ask(self, method: str, parameters: dict[str, Any]) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        return answer

    def set_window(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and the color scheme that its user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str, until: str = _RENDERED) -> float:
        """Open a page, wait until a JavaScript expression is true in it, and return how many seconds that took."""
        self.messages.clear()
        began = time.perf_counter()
        loads = self._loads
        self.call("Page.navigate", url=url)
        while self._loads == loads:
            self._note(self._receive())
        self.wait_for(until)
        return time.perf_counter() - began

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Wait until a JavaScript expression is true; it is false while another page is being opened."""
        deadline = time.monotonic() + deadline_s
        polling = f"new Promise(done => setTimeout(() => done(!!({condition})), 20))"
        parameters = {"expression": polling, "returnByValue": True, "awaitPromise": True}
        while True:
            answer = self._ask("Runtime.evaluate", parameters)
            if answer.get("result", {}).get("result", {}).get("value") is True:
                return
            assert time.monotonic() < deadline, f"waited {deadline_s} s for {condition}; the page said {self.messages}"

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _receive(self) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._data:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not respond within {DEADLINE_S} s"
            data = os.read(self._answers, 1 << 20)
            assert data, f"the browser exited with {self._process.poll()}"
            self._data += data
        message, _, self._data = self._data.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        """Record errors of the page, and its requests to other hosts."""
        parameters = event.get("params", {})
        if event.get("method") == "Page.loadEventFired":
            self._loads += 1
        elif event.get("method") == "Runtime.exceptionThrown":
            self.messages.append(str(parameters["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            self.messages.append(parameters["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(("data:", "file:", "http://127.0.0.1:", "about:")):
                self.messages.append(f"wanted {url}")


def find_browser() -> str | None:
    """Return the executable of a Chromium, or None if there is none."""
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


@contextlib.contextmanager
def browsing(directory: Path) -> Iterator[Browser]:
    """Open a browser with its own profile for the duration of a ``with`` block; skip the test if there is none."""
    program = find_browser()
    if program is None:
        pytest.skip("there is no Chromium on this machine; the page's data and markup are tested without")
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()

    arguments = [program, *_OPTIONS, f"--user-data-dir={directory}", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        [sys.executable, "-c", _HAND_OVER, str(theirs_in), str(theirs_out), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs_in, theirs_out),
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(process, commands, answers)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
        os.close(commands)
        os.close(answers)
