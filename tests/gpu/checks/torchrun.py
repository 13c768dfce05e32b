"""Steps per second and memory of DistributedDataParallel, next to torchrun with the same script."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu.check import Figures, Run, check

PAIRS = {"cuda": 3, "cpu": 1}
"""The number of times that each side runs. The sides alternate."""
LOWEST_RATIOS = {"encoder steps/s": 0.9, "perceptron steps/s": 0.8}
"""Relative to torchrun. The perceptron reports over 500 times per second, and each side varies by 10 % between runs."""
HIGHEST_MEMORY_RATIO = 1.1
"""Relative to torchrun. The peak has one of two values, 6 % apart; on each side, it can change from run to run."""
LIMIT_S = 60.0


@check(alone=True, limit_s=240)
def ddp_next_to_torchrun(run: Run) -> Figures:
    """Steps per second (with a report in every step) and device memory next to torchrun (without reports)"""
    workers = run.workers()
    sides: dict[str, list[dict[str, float]]] = {"drivetrain": [], "torchrun": []}
    for pair in range(PAIRS[run.device]):
        for side in sorted(sides, reverse=pair % 2 == 1):
            sides[side].append(run_side(side, run, workers, run.directory / f"{side}-{pair}"))
    figures: Figures = {"workers": workers, "pairs": PAIRS[run.device]}
    ratios = {}
    for name in sides["drivetrain"][0]:
        ours, peers = ([figures[name] for figures in sides[side]] for side in ("drivetrain", "torchrun"))
        ratios[name] = statistics.median(mine / theirs for mine, theirs in zip(ours, peers, strict=True))
        figures[name] = (
            f"{statistics.median(ours):.5g} (torchrun {statistics.median(peers):.5g}, ratio {ratios[name]:.3f})"
        )
    for name, ratio in ratios.items():
        # On CPU workers, other processes disturb the measurement too much for a limit.
        if name in LOWEST_RATIOS and run.device == "cuda":
            limit = LOWEST_RATIOS[name]
            assert ratio >= limit, f"{name}: expected at least {limit} of torchrun's, got {ratio:.3f}: {figures}"
        elif name.endswith("MiB"):
            limit = HIGHEST_MEMORY_RATIO
            assert ratio <= limit, f"{name}: expected at most {limit} of torchrun's, got {ratio:.3f}: {figures}"
    return figures


def run_side(side: str, run: Run, workers: int, directory: Path) -> dict[str, float]:
    directory.mkdir()
    # The name of this machine may not resolve without a network.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={workers}"]
    command = [
        *(sys.executable, *(launcher if side == "torchrun" else [])),
        *("-m", "tests.gpu.ddp_job", side, "--device", run.device, "--workers", str(workers)),
        *("--result", str(directory / "figures.json")),
    ]
    started = time.monotonic()
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=LIMIT_S, check=True)
    figures = json.loads((directory / "figures.json").read_text())
    figures["whole job s"] = time.monotonic() - started
    print(side, figures, flush=True)  # for the log of a check that reaches its time limit
    return figures
