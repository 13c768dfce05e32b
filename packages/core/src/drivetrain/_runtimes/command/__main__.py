"""Starts a supervisor: ``python -m drivetrain._runtimes.command HOST PORT INDEX [TOKEN_FILE]``."""

import sys

from drivetrain._runtimes.command.supervisor import main

main(sys.argv[1:])
