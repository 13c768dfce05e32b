"""The driver of :func:`drivetrain_testing.prove`: runs a trainer that the function has pickled for it."""

import sys
from pathlib import Path

import cloudpickle

if __name__ == "__main__":
    cloudpickle.loads(Path(sys.argv[1]).read_bytes()).fit()
