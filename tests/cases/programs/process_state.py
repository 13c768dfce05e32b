"""The arguments of a script, and the settings of Python that it makes at its top, arrive in every worker."""

# arguments: local --lr 0.5; inprocess --lr 0.5
# campaign: ray --lr 0.5

import argparse
import decimal
import logging
import os
import sys
import warnings
from typing import Any

import drivetrain


class Ignored(UserWarning):
    pass


class Brackets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"<{super().format(record)}>"


decimal.getcontext().prec = 7
os.umask(0o027)
sys.setrecursionlimit(5000)
warnings.filterwarnings("error", category=RuntimeWarning)
warnings.filterwarnings("ignore", category=Ignored)
logging.basicConfig(level=logging.DEBUG, format="%(levelname)s")
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(Brackets("%(message)s"))
logging.getLogger("of.the.script").addHandler(handler)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("runtime")
    parser.add_argument("--lr", type=float, default=0.001)
    return parser.parse_args()


def raises_warning() -> bool:
    warnings.warn("ignored", Ignored, stacklevel=1)
    try:
        warnings.warn("an error", RuntimeWarning, stacklevel=1)
    except RuntimeWarning:
        return True
    return False


def formats_of(logger: logging.Logger) -> list[str]:
    record = logging.makeLogRecord({"msg": "text", "levelname": "INFO"})
    return [each.format(record) for each in logger.handlers if type(each) is logging.StreamHandler]


def train() -> dict[str, Any]:
    os.umask(umask := os.umask(0))
    return {
        "arguments": parsed_arguments().lr,
        "warnings": raises_warning(),
        "recursion limit": sys.getrecursionlimit(),
        "decimal": decimal.getcontext().prec,
        "umask": umask,
        "level": logging.getLogger().level,
        "handlers": formats_of(logging.getLogger()) + formats_of(logging.getLogger("of.the.script")),
    }


def main() -> bool:
    expected = train()
    runtime = parsed_arguments().runtime
    got = drivetrain.DataParallelTrainer(
        train,
        scaling_config=drivetrain.ScalingConfig(num_workers=0 if runtime == "inprocess" else 2, runtime=runtime),
        run_config=drivetrain.RunConfig(verbose=0),
    ).fit()
    print(expected, got.return_value)
    return expected["arguments"] == 0.5 and bool(got.return_value == expected)


if __name__ == "__main__":
    sys.exit(not main())
