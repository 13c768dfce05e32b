"""A train function is called with the config, or without arguments, and trains when it is called.

Partials, methods, callable objects and decorated functions are train functions. Functions that would train nothing, or
receive the config as another argument, are refused before the start, or fail if that is only visible when they run.
"""

# arguments: local; inprocess
# campaign: ray

import asyncio
import functools
import sys

import drivetrain
from drivetrain import ConfigurationError, RunConfig, ScalingConfig, TrainingFailedError

RUNTIME = sys.argv[1] if len(sys.argv) > 1 else "local"


def plain(config):
    drivetrain.report({"lr": config["lr"]})


def two(scale, config):
    drivetrain.report({"lr": scale * config["lr"]})


async def coroutine(config):
    plain(config)


def generator(config):
    plain(config)
    yield 1


class Recipe:
    def fit(self, config):
        plain(config)

    async def fit_later(self, config):
        plain(config)

    def __call__(self, config):
        plain(config)


class AsyncRecipe:
    async def __call__(self, config):
        plain(config)


def timed(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def without_wraps(function):
    def wrapper(*args):
        return function(*args)

    return wrapper


def in_a_loop(function):
    @functools.wraps(function)
    def wrapper(config):
        asyncio.run(function(config))

    return wrapper


def default_none(config=None):
    plain(config)


def numbers(lr=0.5, epochs=1):
    drivetrain.report({"lr": lr})


def variadic(**config):
    plain(config)


ACCEPTED = {
    "partial": functools.partial(two, 1),
    "method": Recipe().fit,
    "object": Recipe(),
    "decorated": timed(plain),
    "decorated without wraps": without_wraps(plain),
    "coroutine that a decorator runs": in_a_loop(coroutine),
    "config=None": default_none,
    "lambda": lambda config: drivetrain.report({"lr": config["lr"]}),
}
REFUSED = {
    "async def": coroutine,
    "generator": generator,
    "partial of async def": functools.partial(coroutine),
    "async method": Recipe().fit_later,
    "async __call__": AsyncRecipe(),
    "decorated async def": timed(coroutine),
    "decorated generator": timed(timed(generator)),
    "two arguments": two,
    "numbers as defaults": numbers,
    "keyword arguments": variadic,
}
FAILS = {"returns a coroutine": without_wraps(coroutine), "returns a generator": without_wraps(generator)}


def fit(function):
    workers = {"num_workers": 0} if RUNTIME == "inprocess" else {"num_workers": 1, "runtime": RUNTIME}
    return drivetrain.DataParallelTrainer(
        function,
        train_loop_config={"lr": 0.5},
        scaling_config=ScalingConfig(**workers),
        run_config=RunConfig(verbose=0, worker_output="none"),
    ).fit()


if __name__ == "__main__":
    problems = [name for name, function in ACCEPTED.items() if fit(function).metrics["lr"] != 0.5]
    for cases, expected in ((REFUSED, ConfigurationError), (FAILS, TrainingFailedError)):
        for name, function in cases.items():
            try:
                fit(function)
                problems.append(name)
            except expected as error:
                if "[DT-104]" not in str(error):
                    problems.append(f"{name}: {error}")
    print("\n".join(problems) or "OK")
    sys.exit(bool(problems))
