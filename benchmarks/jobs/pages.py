"""A run with many reports on one rank: its page and its live view are opened in a browser."""

import json
import math
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from stamps import options, stamp

from drivetrain import Result
from drivetrain._storage.directory import Storage
from drivetrain._storage.remote import locate
from drivetrain_console._views.server import RunsServer

sys.path.append(str(Path(__file__).parents[2]))

from tests.browser import browsing, find_browser


def make_run(directory: Path, reports: int) -> None:
    """Create the directory of a run with the files of its loggers."""
    directory.mkdir(parents=True)
    facts = {"id": "00000001", "name": directory.name, "created": 1.7e9, "starts": 1, "trainer": "DataParallelTrainer"}
    (directory / "run.json").write_text(json.dumps(facts))
    noise = random.Random(0)
    with (directory / "result.json").open("w") as file:
        for i in range(1, reports + 1):
            file.write(
                f'{{"step": {i}, "loss": {1 / math.sqrt(i) + 0.1 * noise.random()}, "accuracy": {i / reports}, '
                f'"_timestamp": {int(1.7e9 + i * 0.002)}, "_time_this_iter_s": 0.002, "_training_iteration": {i}}}\n'
            )


def since(began: float) -> float:
    return time.perf_counter() - began


if __name__ == "__main__":
    config = options(reports=1_000_000)
    if find_browser() is None:
        raise RuntimeError("expected Chromium on PATH. Install it")
    runs = Path(config["storage"])
    make_run(runs / "long", config["reports"])
    page = runs / "long.html"
    began = time.perf_counter()
    Result.from_path(runs / "long").write_report(page)
    written = since(began)
    server = RunsServer(Storage(*locate(runs, what="runs")))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browsing(Path(profile)) as browser:
            browser.look()
            browser.open(f"{server.url}")  # the first page of a browser takes longer
            opened = browser.open(page.as_uri())
            began = time.perf_counter()
            live = browser.open(f"{server.url}run/long")
            browser.wait_for("!document.body.innerText.includes('reading the reports')")
            complete = since(began)
    finally:
        server.close()
        thread.join()
    size_mb = page.stat().st_size / 1e6
    stamp(config, "looked", written=written, opened=opened, live=live, complete=complete, size_mb=size_mb)
