"""Starts a supervisor: ``python -m drivetrain._runtimes.command HOST PORT INDEX [TOKEN_FILE]``."""

import sys

from drivetrain._runtimes.command.supervisor import main

if __name__ == "__main__":
    main(sys.argv[1:])
