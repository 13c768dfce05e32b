"""Runs of the real driver with simulated ranks: its CPU time and memory, without those of the simulation."""

import random
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest
from stamps import options, stamp

sys.path.insert(0, str(Path(__file__).parents[2]))

import drivetrain
from drivetrain import FailureConfig
from drivetrain._wire.events import Exited, Reported, Returned
from tests.simulation.simulator import Scenario, SimulatedGroup, Simulation

PACKAGE = str(Path(drivetrain.__file__).parent / "*")
RANKS_PER_NODE = 8


@dataclass
class Measured(Simulation):
    """A simulated run that separates the CPU time of the driver from that of the simulation.

    Attributes:
        lose_at: the number of the report at which a node is lost; 0 to lose none.
        measures_memory: True to measure the memory that the package has allocated when the first rank returns.
        simulated_s: the CPU time of the simulation so far.
        reports: the number of reports so far.
        reports_s: the driver's CPU time from the first report to the first return of a rank.
        failure_s: the driver's CPU time from the loss of a node to the tasks of the next attempt.
        memory_bytes: the memory.
    """

    lose_at: int = 0
    measures_memory: bool = False
    simulated_s: float = 0.0
    reports: int = 0
    reports_s: float | None = None
    failure_s: float = 0.0
    memory_bytes: int = 0
    first_report_s: float | None = None
    lost_s: float | None = None

    @property
    def driver_s(self):
        """The driver's CPU time so far."""
        return time.process_time() - self.simulated_s


class MeasuredGroup(SimulatedGroup):
    """Measures the driver's time between the calls of this group."""

    def train(self, tasks):
        measured = self.simulation
        if self.attempt == 1:
            measured.failure_s = measured.driver_s - measured.lost_s
        started = time.process_time()
        super().train(tasks)
        measured.simulated_s += time.process_time() - started

    def pump(self, deliver, timeout_s):
        measured, entered, driver_s = self.simulation, time.process_time(), 0.0

        def deliver_measured(event):
            nonlocal driver_s
            started = time.process_time()
            measured.simulated_s += started - entered
            self._before(event)
            is_over = deliver(event)
            driver_s = time.process_time() - started
            measured.simulated_s -= started - entered
            return is_over

        super().pump(deliver_measured, timeout_s)
        measured.simulated_s += time.process_time() - entered - driver_s

    def _before(self, event):
        """Note an event. The time of the simulation is up to date."""
        measured = self.simulation
        if isinstance(event, Reported):
            measured.reports += 1
            if measured.first_report_s is None:
                measured.first_report_s = measured.driver_s
            if measured.reports == measured.lose_at:
                for rank in self._ranks[:RANKS_PER_NODE]:
                    rank.lose("was lost with its node")
        elif isinstance(event, Exited) and measured.lost_s is None:
            measured.lost_s = measured.driver_s
        elif isinstance(event, Returned) and measured.reports_s is None:
            measured.reports_s = measured.driver_s - measured.first_report_s
            if measured.measures_memory:
                snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, PACKAGE)])
                measured.memory_bytes = sum(trace.size for trace in snapshot.traces)


def simulate(config, directory, *, steps, lose_at=0, measures_memory=False):
    """Run once, and return the simulation with its figures."""
    scenario = Scenario(
        world_size=config["ranks"],
        steps=steps,
        every=5,
        ranks_per_node=RANKS_PER_NODE,
        delay_s=0.01,
        polls=True,
        uploads_later=False,
        combines=True,
        uneven=False,
        faults=0,
        kinds=(),
    )
    directory.mkdir(parents=True)
    measured = Measured(
        directory,
        random.Random(1),
        scenario,
        group_class=MeasuredGroup,
        lose_at=lose_at,
        measures_memory=measures_memory,
    )
    measured.check = lambda: None  # takes time that is quadratic in the number of reports
    if measures_memory:
        tracemalloc.start()
    with pytest.MonkeyPatch.context() as patch:
        measured.run(patch, FailureConfig(max_failures=1))
    tracemalloc.stop()
    return measured


if __name__ == "__main__":
    config = options(ranks=100, steps=10)
    storage = Path(config["storage"])
    simulate(config, storage / "warm-up", steps=1)
    reported = simulate(config, storage / "reports", steps=config["steps"])
    failed = simulate(config, storage / "failure", steps=2, lose_at=config["ranks"])
    measured = simulate(config, storage / "memory", steps=2, measures_memory=True)
    stamp(
        config,
        "simulated",
        report_us=reported.reports_s / reported.reports * 1e6,
        failure_s=failed.failure_s,
        rank_kb=measured.memory_bytes / config["ranks"] / 1000,
    )
