"""The observer of the workers in ``test_jobs.py``."""

import os
import signal

from drivetrain import TrainContext
from drivetrain.plugin.sessions import OBSERVER, Observer
from tests.support import wait_for_release

COMMITS = f"{OBSERVER}_COMMITS"
"""The environment variable with the path of the pipe that the driver releases at each commit."""
KILLS = f"{OBSERVER}_KILLS"
"""The environment variable that is 1 if rank 1 of two workers kills itself."""


class JobObserver(Observer):
    """Kills rank 1 after its second report, or lets a single worker report only as fast as the driver commits."""

    def on_start(self, context: TrainContext, iteration: int) -> None:
        self.rank, self.size, self.first = context.get_world_rank(), context.get_world_size(), iteration

    def on_report(self, iteration: int, has_checkpoint: bool) -> None:
        if self.size == 1 and has_checkpoint:
            wait_for_release(os.environ[COMMITS])
        elif os.environ[KILLS] == "1" and self.rank == 1 and iteration == self.first + 2:
            wait_for_release(os.environ[COMMITS])
            os.kill(os.getpid(), signal.SIGKILL)
