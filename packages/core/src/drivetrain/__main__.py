"""``python -m drivetrain``: the ``drivetrain`` command of the environment of this Python."""

import sys
from importlib.metadata import entry_points

if __name__ == "__main__":
    scripts = [point for point in entry_points(group="console_scripts") if point.name == "drivetrain"]
    if not scripts:
        sys.exit("drivetrain: the command line is not installed. Run: pip install drivetrain")
    sys.exit(scripts[0].load()())
