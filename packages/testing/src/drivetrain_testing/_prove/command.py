"""``drivetrain prove``: shows that a script resumes exactly, or the first difference and its cause."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from drivetrain import ConfigurationError
from drivetrain.plugin.callbacks import printable_text, redact
from drivetrain_console import BAD, OK, Commands, add_command, emit
from drivetrain_testing._prove.kills import VICTIMS
from drivetrain_testing._prove.proof import prove_command

__all__ = ["add_prove"]

_EXAMPLES = """\
  drivetrain prove train.py
  drivetrain prove --kills 6 --ignore seconds_per_epoch train.py --epochs 5
  drivetrain prove --kill node --runtime ray train.py   a node of a Ray cluster, started for this
  drivetrain prove --resize 3 train.py     continue on 3 workers after the kill
"""


def add_prove(commands: Commands) -> None:
    """Add ``prove``."""
    parser = add_command(
        commands,
        "prove",
        _prove,
        "show that a script that is killed and resumed ends like an undisturbed one, or why not",
        _EXAMPLES,
    )
    parser.usage = "drivetrain prove [OPTION ...] SCRIPT [ARGUMENT ...]"
    parser.allow_abbrev = False
    parser.add_argument("script", help="the script that calls fit(); options of prove come before it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")
    parser.add_argument("--kills", type=int, default=2, metavar="N", help="the number of kills (default: 2)")
    parser.add_argument(
        "--kill",
        action="append",
        choices=["rank", "driver", "node"],
        dest="victims",
        help="what is killed: a rank, the driver, or a node of a Ray cluster; repeatable (default: rank and driver, in "
        "turn)",
    )
    parser.add_argument(
        "--resize", type=int, metavar="N", help="continue with N workers after the first kill, which is of the driver"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="a metric, or an entry of the checkpoint, that may differ; repeatable",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="NUMBER",
        help="the difference that numbers may have (default: none, or 0.001 with --resize)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the seed of the moments of the kills")
    parser.add_argument("--runtime", metavar="NAME", help="the runtime, instead of the script's")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="the time limit of all runs (default: 600)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep the run directories in a new directory")


def _prove(arguments: argparse.Namespace) -> int:
    script = Path(arguments.script)
    if not script.is_file():
        raise ConfigurationError(f"prove: expected a script that exists, got {arguments.script}")
    given = arguments.arguments[1:] if arguments.arguments[:1] == ["--"] else arguments.arguments
    before = signal.signal(signal.SIGTERM, _interrupt)  # so that the processes and the directory are removed
    try:
        proof = prove_command(
            [sys.executable, str(script), *given],
            kills=arguments.kills,
            victims=arguments.victims or VICTIMS,
            resize=arguments.resize,
            ignore=arguments.ignore,
            seed=arguments.seed,
            tolerance=arguments.tolerance,
            timeout_s=arguments.timeout,
            runtime=arguments.runtime,
            keep=arguments.keep,
            tell=lambda line: None if arguments.json else _tell(line),
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    emit(arguments, proof.as_dict(), lambda: str(proof))
    return OK if proof.equal else BAD


def _tell(line: str) -> None:
    print(f"prove: {redact(printable_text(line))}", file=sys.stderr, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> Any:
    raise SystemExit(128 + number)
