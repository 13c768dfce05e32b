"""``python -m drivetrain``: the ``drivetrain`` command of the environment of this Python."""

import sys

from drivetrain._cli import main

if __name__ == "__main__":
    sys.exit(main())
