"""The train function of the jobs that fail: one rank is killed or raises, while the other is in an endless loop."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from stamps import stamp

LOST_RANK = 1
SETTLE_S = 0.5


def fail(config: dict[str, Any], rank: int, world_size: int) -> None:
    """Fail as the option ``how`` says, once every rank has arrived and some time has passed."""
    stamp(config, "train_function")
    if rank != LOST_RANK:
        while True:
            pass
    while Path(config["stamps"]).read_text().count("train_function") < world_size:
        time.sleep(0.01)
    time.sleep(SETTLE_S)
    stamp(config, "failing")
    if config["how"] == "exception":
        raise RuntimeError("requested by the benchmark")
    os.kill(os.getpid(), signal.SIGKILL)
