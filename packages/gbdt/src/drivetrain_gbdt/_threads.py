"""The number of threads that a worker may use."""

import os

__all__ = ["worker_threads"]


def worker_threads() -> int:
    """Return the worker's share of its node's cores, which the runtime sets in the environment; 0 if it is not set."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(threads) if threads.isdecimal() else 0
