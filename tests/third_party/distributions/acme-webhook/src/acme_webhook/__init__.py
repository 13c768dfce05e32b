"""Posts the events of a drivetrain run as JSON to a URL: ``RunConfig(callbacks=[("webhook", {"url": ...})])``."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from drivetrain import Callback, ConfigurationError
from drivetrain.plugin import Failure, Report, Run
from drivetrain.plugin.callbacks import flatten, redact

__all__ = ["Webhook"]


class Webhook(Callback):
    """Posts each report, each failure and the end of a run. A server that is down or slow does not affect the run.

    A thread posts the events in order. At the end of the run, the callback waits for this thread, but not longer than
    ``timeout_s``, and prints how many events were not delivered. Redirects are not followed: they count as errors.

    Args:
        url: an ``http://`` or ``https://`` URL.
        token: sent in the header ``Authorization``; empty for none.
        timeout_s: seconds after which the server counts as unresponsive.
        max_pending: if this number of events has not been posted yet, further reports are dropped.
    """

    def __init__(self, url: str, *, token: str = "", timeout_s: float = 5.0, max_pending: int = 1000) -> None:
        self._target = urlsplit(url)
        if self._target.scheme not in ("http", "https") or not self._target.hostname:
            raise ConfigurationError(f"webhook: expected an http:// or https:// URL, got {redact(url)!r}")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        self._timeout_s = timeout_s
        self._max_pending = max_pending
        self._problem = ""
        self._events = self._delivered = 0
        self._pending: queue.SimpleQueue[dict[str, Any] | None] | None = None
        self._thread: threading.Thread | None = None

    def on_run_start(self, run: Run) -> None:
        self._problem = f"no response within {self._timeout_s:g} s"
        self._events = self._delivered = 0
        self._pending = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._post_events, args=(self._pending,), name="webhook", daemon=True)
        self._thread.start()

    def on_report(self, run: Run, report: Report) -> None:
        metrics = {name: _as_json(value) for name, value in flatten(report.metrics).items()}
        self._add(run, "report", rank=report.rank, iteration=report.iteration, metrics=metrics)

    def on_failure(self, run: Run, failure: Failure, retrying: bool) -> None:
        self._add(run, "failure", kind=failure.kind.value, summary=failure.summary, retrying=retrying)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self._add(run, "end", error=None if error is None else f"{type(error).__name__}: {error}")
        if self._pending is not None and self._thread is not None:
            self._pending.put(None)
            self._thread.join(self._timeout_s)
        if missing := self._events - self._delivered:
            message = f"webhook: {missing} of {self._events} events were not delivered: {self._problem}"
            run.console.print(message, error=True)
        self._pending = self._thread = None  # so that the callback can be pickled for another run

    def _add(self, run: Run, event: str, **fields: Any) -> None:
        self._events += 1
        if self._pending is not None and (event != "report" or self._pending.qsize() < self._max_pending):
            self._pending.put({"event": event, "run": run.name, "id": run.id, **fields})

    def _post_events(self, pending: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        while (event := pending.get()) is not None:
            try:
                self._post(json.dumps(event).encode())
                self._delivered += 1
            except (OSError, HTTPException) as error:
                self._problem = str(error) or type(error).__name__

    def _post(self, body: bytes) -> None:
        connect = HTTPSConnection if self._target.scheme == "https" else HTTPConnection
        connection = connect(self._target.hostname or "", self._target.port, timeout=self._timeout_s)
        with contextlib.closing(connection):
            path = self._target._replace(scheme="", netloc="", fragment="").geturl()
            connection.request("POST", path or "/", body, self._headers)
            response = connection.getresponse()
            if response.status // 100 != 2:
                raise OSError(f"expected a status from 200 to 299, got {response.status} {response.reason}")


def _as_json(value: Any) -> Any:
    """Return a metric as a value that every JSON parser accepts: NaN, infinity and objects become strings."""
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
