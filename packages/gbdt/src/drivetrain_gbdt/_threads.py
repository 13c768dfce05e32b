"""The number of threads that a worker may use."""

import os

__all__ = ["worker_threads"]


def worker_threads() -> int:
    """Return the number of CPUs of this worker, which the runtime sets as ``OMP_NUM_THREADS``; 0 if it is not set."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(threads) if threads.isdecimal() else 0
