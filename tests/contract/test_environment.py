"""Environment variables of a backend: all workers have them before any import, and a rank has its own ones."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from drivetrain import Callback, get_context, report
from drivetrain.plugin import Backend, Report, Run, WorkerInfo
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import same_on_ray

VARIABLES = ("TALLY_THREADS", "TALLY_RANK", "TALLY_OLD")


def read_variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in VARIABLES}


class WithEnvironment(Backend):
    name = "tally"
    preload = ("tests.contract.environment_at_import",)
    environment: ClassVar = {"TALLY_THREADS": "3", "TALLY_OLD": "new"}

    def rank_environment(self, worker: WorkerInfo, workers: Sequence[WorkerInfo]) -> Mapping[str, str]:
        return {"TALLY_RANK": f"{worker.rank} of {len(workers)}"}

    def rendezvous(self, group: Any) -> Sequence[Mapping[str, str]]:
        assert group.attempt.number == 0
        assert group.attempt.run_name == "run"
        return [{"seen": str(seen["TALLY_RANK"])} for seen in group.run(read_variables)]

    @contextlib.contextmanager
    def session(self, context: Any, rendezvous: Mapping[str, str]) -> Iterator[None]:
        assert rendezvous["seen"] == os.environ["TALLY_RANK"]
        yield


def train() -> None:
    from tests.contract import environment_at_import

    context = get_context()
    assert read_variables() == {
        "TALLY_THREADS": "3",
        "TALLY_RANK": f"{context.get_world_rank()} of {context.get_world_size()}",
        "TALLY_OLD": "new",
    }
    report({"at_import": environment_at_import.THREADS})


class CountsReports(Callback):
    def __init__(self) -> None:
        self.reports = 0

    def on_report(self, run: Run, report: Report) -> None:
        self.reports += 1


class WithCallback(WithEnvironment):
    def __init__(self) -> None:
        self.callback = CountsReports()

    def callbacks(self) -> Sequence[Callback]:
        return [self.callback]


def test_workers_have_the_variables_of_the_backend(runtime: RuntimeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLY_OLD", "old")
    result = runtime.trainer(train, backend_config=WithEnvironment()).fit()
    if runtime.has_processes:
        assert result.metrics["at_import"] == "3", "the variable was set after the import"
    assert read_variables() == {"TALLY_THREADS": None, "TALLY_RANK": None, "TALLY_OLD": "old"}


@same_on_ray
def test_callbacks_of_the_backend_are_called(runtime: RuntimeUnderTest) -> None:
    backend = WithCallback()
    runtime.trainer(train, backend_config=backend).fit()
    assert backend.callback.reports == runtime.world(), "one report per rank"
