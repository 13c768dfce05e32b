"""The traceback of a worker's exception underlines the same part of each line as in the worker.

This includes its cause, and the members of an exception group.
"""

import builtins
import itertools
import sys
import traceback
from typing import Any

import drivetrain


class GroupOfPython310(Exception):
    """Stands for an exception group."""


def divide(numerator: int, divisors: dict[str, int]) -> float:
    return numerator / divisors["first"] + numerator / divisors["second"]


def lookup(numbers: dict[str, Any]) -> Any:
    return [numbers["a"], numbers["b"]["c"], numbers["d"]["e"]["f"]]


def failures() -> list[Exception]:
    errors: list[Exception] = []
    for function, arguments in ((divide, (1, {"first": 1, "second": 0})), (lookup, ({"a": 1, "b": {}},))):
        try:
            function(*arguments)
        except Exception as error:
            errors.append(error)
    return errors


def train() -> None:
    first, second = failures()
    try:
        raise getattr(builtins, "ExceptionGroup", GroupOfPython310)("both", [first, second])
    except Exception as error:
        try:
            raise ValueError("no result") from error
        except ValueError as raised:
            raised.args = ("no result", "".join(traceback.format_exception(raised)))
            raise


try:
    drivetrain.DataParallelTrainer(
        train,
        scaling_config=drivetrain.ScalingConfig(num_workers=2),
        run_config=drivetrain.RunConfig(verbose=0),
    ).fit()
except drivetrain.TrainingFailedError as error:
    cause = error.__cause__
assert cause is not None


def underlined(text: str) -> list[str]:
    """Return the lines that are underlined, and the underlines, without the indentation of groups."""
    lines = [line.strip("| ") for line in text.splitlines()]
    return [line for pair in itertools.pairwise(lines) for line in pair if set(pair[1]) and set(pair[1]) <= {*"^~"}]


expected = underlined(cause.args[1])
cause.args = ("no result",)
got = underlined("".join(traceback.format_exception(cause)))
print("\n".join([*expected, "got", *got]))
sys.exit(not (got[-len(expected) :] == expected and (len(expected) >= 4 or sys.version_info < (3, 11))))
