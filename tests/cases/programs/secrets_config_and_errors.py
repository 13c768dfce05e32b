"""The train function gets the secrets in its config; no file of the run but `trainer.pkl`, and no output, has them.

The same holds for secrets in the message of an exception, and for the parameters that trackers receive.
"""

# arguments: inprocess; local
# campaign: ray

import contextlib
import io
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import Callback, DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain.plugin import Run
from drivetrain_track import parameters

CANARY = "canary"
CONFIG = {
    "hf_token": "canary-1",
    "password": "canary-2",
    "service": {"api_key": "canary-3", "url": "https://user:canary-4@host/x"},
    "credentials": ["user", "canary-5"],
    "lr": 0.125,
    "num_key_value_heads": 8,
    "pad_token": "<pad>",
}
MESSAGE = (
    "login(token=canary-a) failed: Authorization: Bearer canary-b, "
    "HF_API_KEY=canary-c, KEY=canary-d, {'secret': 'canary-e', \"password\": \"canary-f\"}"
)
seen: dict[str, Any] = {}


class Tracker(Callback):
    """Keeps what a tracker would send."""

    def on_run_start(self, run: Run) -> None:
        """Keep the parameters."""
        seen["parameters"] = parameters(run)

    def on_failure(self, run: Run, failure: Any, retrying: bool) -> None:
        """Keep the failure."""
        seen["failure"] = failure.summary


def train(config: dict[str, Any]) -> None:
    """Fail with a message full of secrets, if the config has its values."""
    if config["hf_token"] != "canary-1" or config["service"]["api_key"] != "canary-3":
        raise AssertionError("the config lost its values")
    drivetrain.report({"loss": 1.0})
    raise RuntimeError(MESSAGE)


def main() -> None:
    """Run and restore the training, and search everything that it wrote or printed."""
    runtime = sys.argv[1]
    scaling = ScalingConfig(num_workers=0) if runtime == "inprocess" else ScalingConfig(num_workers=1, runtime=runtime)
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as storage, contextlib.redirect_stderr(printed):
        trainer = DataParallelTrainer(
            train,
            train_loop_config=CONFIG,
            scaling_config=scaling,
            run_config=RunConfig(name="run", storage_path=storage, callbacks=[Tracker()], log_to_file=False),
        )
        printed.write(trainer._repr_html_())
        error = trainer.fit(raise_on_failure=False).error
        path = Path(storage, "run")
        again = DataParallelTrainer.restore(path).fit(raise_on_failure=False).error
        files = [file for file in path.rglob("*") if file.is_file() and file.name not in ("trainer.pkl", ".lock")]
        texts = {file.name: file.read_text() for file in files}
        mode = stat.S_IMODE((path / "trainer.pkl").stat().st_mode)
    texts |= {"output": printed.getvalue(), "error": str(error), "error after restore": str(again)}
    texts |= {name: repr(value) for name, value in seen.items()}
    found = [f"{name}: {text}" for name, text in texts.items() if CANARY in text]
    expected = {"run.json", "timeline.jsonl", "error.json", "error.txt", "parameters", "failure"}
    is_complete = expected <= texts.keys() and "login(token=***)" in str(again)
    is_useful = seen["parameters"]["num_key_value_heads"] == 8 and "0.125" in texts["run.json"]
    if found or not is_complete or not is_useful or mode != 0o600:
        print(*found, texts.keys(), again, oct(mode), sep="\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
