"""``python -m tests.ports OWNER/NAME=CHECKOUT ...``: runs the ported programs of repositories and prints their table.

A checkout is a clone of the repository, with or without a work tree. The programs run as they are in its commit HEAD.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import platform
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.ports.programs import PORTS
from tests.ports.running import compare, temporary_directory

_FRAMEWORKS = ("torch", "lightning", "accelerate", "transformers", "xgboost", "lightgbm")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    failed, rows = 0, []
    directory = temporary_directory()
    for port in PORTS:
        checkout = options.checkouts.get(port.repository)
        if checkout is None or (options.only and port.name not in options.only):
            continue
        try:
            row = compare(port, checkout, directory / port.name)
        except Exception:
            failed += 1
            traceback.print_exc()
            continue
        rows.append(row)
        print(json.dumps(row), flush=True)
    versions = ", ".join(f"{name} {importlib.import_module(name).__version__}" for name in _FRAMEWORKS)
    print(f"{datetime.date.today()}, Python {platform.python_version()}, {versions}")
    print(_table(rows))
    if failed or options.keep:
        print(f"files of the runs: {directory}", file=sys.stderr)
    else:
        shutil.rmtree(directory)
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.ports", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "checkouts", nargs="+", metavar="OWNER/NAME=CHECKOUT", help="a repository and the directory of its clone"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this program; repeatable")
    parser.add_argument("--keep", action="store_true", help="keep the files of the runs")
    options = parser.parse_args(arguments)
    options.checkouts = {name: Path(path) for name, _, path in (text.partition("=") for text in options.checkouts)}
    known = sorted({port.repository for port in PORTS})
    if unknown := options.checkouts.keys() - set(known):
        parser.error(f"expected repositories of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    return options


def _table(rows: Sequence[dict[str, object]]) -> str:
    """Return the table of ``docs/ported-programs.md``."""
    lines = ["| program | commit | unchanged | changed lines | losses | after a kill |", "|---|---|---|---|---|---|"]
    for row in rows:
        repository, script, commit = row["repository"], row["script"], str(row["commit"])
        program = f"`{repository}`: [`{script}`](https://github.com/{repository}/blob/{commit}/{script})"
        cells = (program, f"`{commit[:9]}`", row["unchanged"], row["changed_lines"], row["losses"], row["resume"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
