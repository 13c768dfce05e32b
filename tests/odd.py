"""Odd exceptions and output streams, shared by the tests of failures and the fuzz cases."""

import sys


class OwnBaseException(BaseException):
    pass


class TextFails(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class TextExits(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


class ReduceFails(Exception):
    def __reduce__(self) -> str:
        raise RuntimeError("not picklable")


class BrokenStream:
    def write(self, text: str) -> int:
        raise OSError("broken stream")

    def flush(self) -> None:
        raise OSError("broken stream")


def fail_with_broken_streams() -> None:
    sys.stdout = sys.stderr = BrokenStream()  # type: ignore[assignment]
    raise ZeroDivisionError("the real error")


def fail_with_closed_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()
    raise ZeroDivisionError("the real error")
