"""The floor on one machine: a forked process is killed while another is in an endless loop; the parent detects it."""

import os
import select
import signal

from failing import LOST_RANK, fail
from stamps import options, stamp

if __name__ == "__main__":
    config = options(framework="none", how="kill")
    if config["framework"] == "torch":
        import torch.distributed.nn  # noqa: F401
    workers = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            fail(config, rank, 2)
            os._exit(1)
        workers.append(pid)
    select.select([os.pidfd_open(workers[LOST_RANK])], [], [])
    stamp(config, "noticed")
    os.kill(workers[1 - LOST_RANK], signal.SIGKILL)
