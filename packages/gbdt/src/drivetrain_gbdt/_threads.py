"""How many threads a worker may use."""

import os

__all__ = ["worker_threads"]


def worker_threads() -> int:
    """The worker's share of its node's cores, which the runtime has put into the environment; 0 where it has not."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(asked) if asked.isdecimal() else 0
