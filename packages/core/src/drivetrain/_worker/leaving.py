"""Ends a worker process as Python ends a process, but within a time limit, and without inherited exit handlers.

A complete exit of the interpreter may hang or abort after collectives, because of the exit handlers that a framework
registered when it was imported. Therefore a worker performs only those parts of it that the train function relies on,
and then calls ``os._exit``.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import gc
import io
import logging
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

from drivetrain._worker.output import flush_output

__all__ = ["EXIT_LIMIT_S", "ExitHandlers", "finish_process"]

EXIT_LIMIT_S = 10.0
"""Seconds that a process has for exiting after its train function has returned."""

_FLUSHED = ("Writer", "File")
_BUFFERED = (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)


class ExitHandlers:
    """The exit handlers that are registered with :mod:`atexit` after this object was created."""

    def __init__(self) -> None:
        self._handlers: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._register, self._unregister = atexit.register, atexit.unregister
        atexit.register = self._note
        atexit.unregister = self._forget

    def run(self) -> None:
        """Call the handlers, the latest first, and print their exceptions, as Python does."""
        while self._handlers:
            handler, args, options = self._handlers.pop()
            self._unregister(handler)
            try:
                handler(*args, **options)
            except BaseException:  # raised by a user's handler; the other handlers must run too
                traceback.print_exc()

    def _note(self, handler: Callable[..., Any], /, *args: Any, **options: Any) -> Callable[..., Any]:
        self._handlers.append((handler, args, options))
        return self._register(handler, *args, **options)

    def _forget(self, handler: Callable[..., Any], /) -> None:
        self._handlers = [noted for noted in self._handlers if noted[0] != handler]
        self._unregister(handler)


def finish_process(handlers: ExitHandlers) -> None:
    """Join threads, run exit handlers, delete temporary directories, and write buffered output to files.

    The caller then ends the process. If this takes longer than :data:`EXIT_LIMIT_S`, this function ends the process.
    """
    watchdog = threading.Timer(EXIT_LIMIT_S, _give_up)
    watchdog.daemon = True
    watchdog.start()
    _join_threads()
    handlers.run()
    logging.shutdown()
    _release(gc.get_objects())  # without those that existed before the fork
    flush_output()
    watchdog.cancel()


def _join_threads() -> None:
    """Wait for the threads that Python waits for. The threads of an idle executor end when it is shut down."""
    for thing in gc.get_objects():
        if issubclass(type(thing), concurrent.futures.Executor):
            thing.shutdown()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def _give_up() -> None:
    others = [thread.name for thread in threading.enumerate() if not thread.daemon]
    print(
        f"drivetrain: this process did not exit within {EXIT_LIMIT_S:g} s after its train function had returned, and "
        f"is ended now. Threads: {', '.join(others)}",
        file=sys.stderr,
    )
    flush_output()
    os._exit(0)


def _release(things: list[Any]) -> None:
    """Delete temporary directories, and write buffered output to files.

    A stream may write to another one: a text stream to a compressed file, and that file to a buffered one. Therefore
    the streams are handled in this order. Classes such as TensorBoard's ``SummaryWriter`` and HDF5's ``File`` have
    buffers of their own. They are recognized by their names and their method ``flush``.
    """
    for step in (_flush_writer, _close_wrapper, _flush_buffer):
        for thing in things:
            with contextlib.suppress(Exception):  # the object may be broken, and its class may raise anything
                step(thing, type(thing))


def _flush_writer(thing: Any, kind: type) -> None:
    if issubclass(kind, tempfile.TemporaryDirectory):
        thing.cleanup()
    elif issubclass(kind, io.TextIOWrapper) or (kind.__name__.endswith(_FLUSHED) and hasattr(kind, "flush")):
        thing.flush()


def _close_wrapper(thing: Any, kind: type) -> None:
    if issubclass(kind, io.BufferedIOBase) and kind.__module__ != "_io":
        thing.close()


def _flush_buffer(thing: Any, kind: type) -> None:
    if issubclass(kind, _BUFFERED):
        thing.flush()
