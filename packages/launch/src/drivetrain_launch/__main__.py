"""Starts a supervisor: ``python -m drivetrain_launch HOST PORT INDEX [TOKEN_FILE]``."""

import sys

from drivetrain_launch._supervisor import main

if __name__ == "__main__":
    main(sys.argv[1:])
