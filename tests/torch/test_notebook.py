"""The interactive trainer in a notebook: redefining the function, interrupting a cell and restarting the kernel."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from tests.support import ROOT, Pipe, is_running, open_pipe, wait_until_exited

DEADLINE_S = 240

SETUP = """
import json, os, sys
sys.path.insert(0, {root!r})
import drivetrain
from drivetrain_interactive import Trainer
trainer = Trainer(backend="torch", num_workers=2, logdir={logdir!r})
trainer.start()
"""
DEFINE = """
def train_func(config):
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(config["add"]))
    dist.all_reduce(total)
    drivetrain.report(total=total.item())
    return os.getpid(), total.item(), "first"
"""
REDEFINE = DEFINE.replace("first", "second").replace("total.item(), ", "-total.item(), ")
RUN = """
print(json.dumps(trainer.run(train_func, config={"add": 2})))
"""
WAIT = """
from tests.support import send_line, wait_for_release
trainer.run(lambda: (send_line({pipe!r}, os.getpid()), wait_for_release({gate!r})))
"""


class Notebook:
    """A kernel, and the cells that it executes."""

    def __init__(self, client: NotebookClient, places: dict[str, str]) -> None:
        self._client = client
        self._places = places

    async def execute(self, source: str) -> tuple[str, str]:
        """Execute a cell; return its standard output and the name of the exception that it raised."""
        text = source.format(**self._places) if source in (SETUP, WAIT) else source
        cell = nbformat.v4.new_code_cell(text.strip())
        self._client.nb.cells.append(cell)
        await self._client.async_execute_cell(cell, len(self._client.nb.cells) - 1)
        printed = "".join(out["text"] for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")
        raised = "".join(out["ename"] for out in cell.outputs if out.output_type == "error")
        return printed, raised

    async def run(self) -> list[list[Any]]:
        """Run the train function that is currently defined, and return the values of all ranks."""
        printed, raised = await self.execute(RUN)
        assert not raised
        values: list[list[Any]] = json.loads(printed)
        return values

    async def interrupt(self) -> None:
        await self._client.km.interrupt_kernel()

    async def restart(self) -> None:
        await self._client.km.restart_kernel()
        await self._client.kc.wait_for_ready(timeout=DEADLINE_S)

    async def kill(self) -> None:
        await self._client.km.signal_kernel(signal.SIGKILL)


@asynccontextmanager
async def notebook(directory: Path, pipe: Pipe, gate: Pipe) -> AsyncIterator[Notebook]:
    client = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=DEADLINE_S,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(directory)}},
    )
    places = {"root": str(ROOT), "logdir": str(directory / "logs"), "pipe": pipe.path, "gate": gate.path}
    async with client.async_setup_kernel():
        yield Notebook(client, places)


async def receive_two_pids(pipe: Pipe) -> list[int]:
    return await asyncio.to_thread(pipe.receive_pids, 2)


def test_notebook_can_redefine_interrupt_and_restart(tmp_path: Path) -> None:
    async def scenario(pipe: Pipe, gate: Pipe) -> None:
        async with notebook(tmp_path, pipe, gate) as nb:
            await nb.execute(SETUP)
            await nb.execute(DEFINE)
            first = await nb.run()
            assert [value[1:] for value in first] == [[4.0, "first"]] * 2

            await nb.execute(REDEFINE)
            second = await nb.run()
            assert [value[1:] for value in second] == [[-4.0, "second"]] * 2
            workers = [value[0] for value in first]
            assert [value[0] for value in second] == workers

            cell = asyncio.create_task(nb.execute(WAIT))
            assert sorted(await receive_two_pids(pipe)) == sorted(workers)
            await nb.interrupt()
            assert await cell == ("", "KeyboardInterrupt")
            wait_until_exited(workers)

            third = await nb.run()
            assert [value[1:] for value in third] == [[-4.0, "second"]] * 2
            workers = [value[0] for value in third]
            assert all(map(is_running, workers))
            await nb.restart()
            wait_until_exited(workers)

            assert await nb.execute(RUN) == ("", "NameError")
            await nb.execute(SETUP)
            cell = asyncio.create_task(nb.execute(WAIT))
            workers = await receive_two_pids(pipe)
            await nb.kill()
            wait_until_exited(workers)
            with pytest.raises(DeadKernelError):
                await cell

    with open_pipe(tmp_path / "pipe") as pipe, open_pipe(tmp_path / "gate") as gate:
        asyncio.run(scenario(pipe, gate))

    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"run_00{number}" for number in range(1, 6)]
