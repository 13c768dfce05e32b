"""Copied next to each program: records the loss of each step, and kills a rank once.

It does not import drivetrain, because the program under its own launcher imports it, too.
"""

import json
import os
import signal
import time
from typing import Any


def step(number: int, loss: Any) -> None:
    """Record the loss of a step with all of its digits.

    ``PORTS_KILL=rank:number`` kills that rank in that step, once. ``PORTS_STEP_S`` makes each step take as long as with
    a larger model, so that there is time to commit a checkpoint before the kill.
    """
    time.sleep(float(os.environ.get("PORTS_STEP_S", "0")))
    rank = int(os.environ.get("RANK", "0"))
    value = loss.item() if hasattr(loss, "item") else loss
    line = json.dumps({"rank": rank, "step": number, "loss": value, "process": os.getpid()})
    with open(os.environ["PORTS_RECORD"], "a") as file:
        file.write(line + "\n")
    if os.environ.get("PORTS_KILL") == f"{rank}:{number}":
        try:
            os.mkdir(os.environ["PORTS_RECORD"] + ".killed")
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
