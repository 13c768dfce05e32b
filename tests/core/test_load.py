"""The warning that the ranks report as fast as the driver can process reports."""

import time
from pathlib import Path

import pytest

from drivetrain import Callback, DataParallelTrainer, RunConfig, ScalingConfig, report
from drivetrain._driver import load
from drivetrain._driver.load import Load


class Slow(Callback):
    def on_report(self, run: object, report: object) -> None:
        time.sleep(0.002)


def report_often() -> None:
    for step in range(300):
        report({"loss": step})


def test_driver_says_once_that_reports_wait_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_WINDOW_S", 0.25)
    DataParallelTrainer(
        report_often,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(tmp_path), verbose=0, callbacks=[Slow()]),
    ).fit()

    (line,) = [line for line in capsys.readouterr().err.splitlines() if "DT-432" in line]
    assert line.startswith("run: [DT-432] report() waits for the driver: the ranks make ")
    assert line.endswith("Report less often")


@pytest.mark.parametrize(("seconds", "reports"), [(9.0, 1), (0.00001, 10_000)], ids=["one report", "little time"])
def test_low_load_is_not_worth_a_message(seconds: float, reports: int) -> None:
    now = 0.0
    measured = Load(clock=lambda: now, cpu_clock=lambda: 0.0)
    for _ in range(5):
        for _ in range(reports):
            measured.note(seconds)
        now += 10.0
        assert measured.describe_if_high() == ""


@pytest.mark.parametrize(
    ("callback_s", "cpu_s", "duration"), [(0.2, 0.0, "200.0 ms"), (0.00001, 8.0, "160.0 ms")], ids=["callback", "CPU"]
)
def test_high_load_is_named_once(callback_s: float, cpu_s: float, duration: str) -> None:
    now = cpu = 0.0
    measured = Load(clock=lambda: now, cpu_clock=lambda: cpu)
    messages = []
    for _ in range(3):
        for _ in range(50):
            measured.note(callback_s)
        now, cpu = now + 10.0, cpu + cpu_s
        messages.append(measured.describe_if_high())

    assert f"the ranks make 5.0 reports per second, each of which takes {duration} with" in messages[0]
    assert messages[1:] == ["", ""]
