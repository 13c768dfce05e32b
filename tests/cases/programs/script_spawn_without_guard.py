"""A process that a worker spawns imports a script without a guard: its `fit()` fails at once with a clear error."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import concurrent.futures, multiprocessing, sys
import drivetrain

def square(number):
    return number * number

def train():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(square, 3).result(60)

drivetrain.DataParallelTrainer(
    train,
    scaling_config=drivetrain.ScalingConfig(num_workers=1),
    run_config=drivetrain.RunConfig(verbose=1),
).fit()
"""

assert "spawn" in multiprocessing.get_all_start_methods()
Path("script.py").write_text(SCRIPT)
done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120, check=False)
output = done.stdout + done.stderr
print(output)
runs = list(Path("runs").iterdir())
sys.exit(
    not (done.returncode == 1 and "[DT-120] fit(): expected the process that started" in output and len(runs) == 1)
)
