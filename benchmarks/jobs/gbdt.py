"""The trainings of the benchmark ``gbdt``: rows in a Parquet file, 100 rounds of XGBoost or LightGBM."""

import threading
from collections.abc import Sequence
from pathlib import Path

import xgboost
from stamps import stamp

ROUNDS = 100
PARAMS = {"objective": "binary:logistic", "eval_metric": "logloss", "max_depth": 6, "nthread": 1}
LIGHTGBM = {"objective": "binary", "metric": "binary_logloss", "num_leaves": 63, "num_threads": 1, "verbosity": -1}
LOOK_S = 0.01


class Stamps(xgboost.callback.TrainingCallback):
    """Stamps the beginning and end of training on each worker."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def before_training(self, model):
        stamp(self.config, "training")
        return model

    def after_training(self, model):
        stamp(self.config, "trained")
        return model


class LightGBMStamps:
    """The same for LightGBM, whose callbacks are functions."""

    before_iteration = True
    order = 0

    def __init__(self, config):
        self.config = config

    def __call__(self, env):
        if env.iteration == 0:
            stamp(self.config, "training")


class LightGBMEnd(LightGBMStamps):
    before_iteration = False
    order = 50

    def __call__(self, env):
        if env.iteration + 1 == env.end_iteration:
            stamp(self.config, "trained")


class MemoryMeter:
    """Measures processes from outside: the peak of each process's own memory over its first value."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._first = {pid: private(pid) for pid in pids}
        self._peaks = dict(self._first)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def grown(self) -> float:
        """Return the mean growth over the processes, in bytes."""
        self._done.set()
        self._thread.join()
        return sum(self._peaks[pid] - first for pid, first in self._first.items()) / len(self._first)

    def _sample(self) -> None:
        while not self._done.wait(LOOK_S):
            for pid, peak in self._peaks.items():
                self._peaks[pid] = max(peak, private(pid))


def private(pid: int) -> int:
    """Return the resident bytes of a process that belong to no file; 0 if it has exited."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
