"""``python -m drivetrain``: the ``drivetrain`` command of the environment of this Python."""

import sys
from importlib.metadata import PackageNotFoundError, distribution

if __name__ == "__main__":
    try:
        console = distribution("drivetrain-console")  # not all distributions: the metadata of another may be damaged
    except PackageNotFoundError:
        sys.exit("drivetrain: the command line is not installed. Run: pip install drivetrain")
    (script,) = console.entry_points.select(group="console_scripts", name="drivetrain")
    sys.exit(script.load()())
