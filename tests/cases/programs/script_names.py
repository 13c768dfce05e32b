"""Every class and function of a script can be pickled by its name in a worker, and comes back as the driver's own."""

# arguments: local; inprocess
# campaign: ray

import concurrent.futures
import dataclasses
import enum
import functools
import multiprocessing
import pickle
import sys
import threading
import typing
from collections.abc import Callable
from typing import Any

import drivetrain

T = typing.TypeVar("T")
SIZE = 3
COUNT = 0


class Plugin:
    known: typing.ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Plugin.known[cls.__name__] = cls


class Adder(Plugin):
    def __init__(self) -> None:
        super().__init__()
        self.size = SIZE


class Named(Plugin):
    """A class to which only a string refers."""

    def __init__(self) -> None:
        self.size = helper()


def helper() -> int:
    return SIZE


class Color(enum.Enum):
    RED = 1


class Point(typing.NamedTuple):
    x: int


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    other: "Options | None" = None


class Box(typing.Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


class Locked:
    lock = threading.Lock()


class TrainError(Exception):
    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"{reason} in step {step}")
        self.step = step


@functools.cache
def doubled(number: int) -> int:
    return 2 * number


def square(number: int) -> Point:
    return Point(number * number)


def count() -> int:
    global COUNT
    COUNT += 1
    return COUNT


def is_pickled_by_name(value: object) -> bool:
    return type(pickle.loads(pickle.dumps(value))) is type(value)


def runs_in_pool(method: str) -> bool:
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return type(pool.submit(square, 3).result(60)) is Point


def missing_name(action: Callable[[], object]) -> str:
    try:
        action()
    except AttributeError as error:
        return str(error)
    return ""


def train(config: dict[str, Any]) -> dict[str, Any]:
    import __main__

    if config["step"]:
        raise TrainError(config["step"], "diverged")
    values = [Adder(), Color.RED, Point(1), Options(), Box(2), config["options"]]
    checks = {str(type(value)): is_pickled_by_name(value) for value in values}
    checks["a function with a cache"] = pickle.loads(pickle.dumps(doubled)) is doubled
    checks["a class in a string"] = is_pickled_by_name(globals()["Named"]())
    checks["annotations"] = str(typing.get_type_hints(Options)) != ""
    checks["identity"] = __main__.Adder is Adder and __main__.square is square and vars(__main__) is globals()
    checks["global"] = (count(), count(), COUNT) == (1, 2, __main__.COUNT)
    checks["registry"] = Plugin.known["Adder"] is Adder
    checks |= {method: runs_in_pool(method) for method in ("fork", "spawn", "forkserver")}
    missing = missing_name(lambda: __main__.Locked)
    checks["a class that cannot be sent"] = "'Locked'" in missing or drivetrain.get_context().get_world_size() == 1
    return {"checks": checks, "objects": [Adder, square, Color.RED, type(Point(1))]}


def main() -> bool:
    runtime = sys.argv[1]
    workers = drivetrain.ScalingConfig(
        num_workers=0 if runtime == "inprocess" else 2, runtime=None if runtime == "inprocess" else runtime
    )

    def fit(step: int) -> Any:
        return drivetrain.DataParallelTrainer(
            train,
            train_loop_config={"step": step, "options": Options(Options())},
            scaling_config=workers,
            run_config=drivetrain.RunConfig(verbose=0),
        ).fit()

    returned = fit(0).return_value
    print({name: passed for name, passed in returned["checks"].items() if not passed})
    own = all(
        mine is theirs for mine, theirs in zip([Adder, square, Color.RED, Point], returned["objects"], strict=True)
    )
    try:
        fit(7)
    except drivetrain.TrainingFailedError as error:
        cause = error.__cause__
    return all(returned["checks"].values()) and own and isinstance(cause, TrainError) and cause.step == 7


if __name__ == "__main__":
    sys.exit(not main())
