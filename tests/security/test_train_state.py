"""Checkpoints of ``TrainState`` from an untrusted source: nothing of them is unpickled."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Checkpoint, CheckpointError, DataParallelTrainer, RunConfig, ScalingConfig, TrainingFailedError
from drivetrain_torch import TrainState
from tests.security.test_pickles import Canary
from tests.torch.sharded import COMMON, load, save

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:torch.distributed is")]


def make_model() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A sharded checkpoint of one rank."""
    model = make_model()
    save(tmp_path / "sharded", model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return tmp_path / "sharded"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A checkpoint of a ``TrainState`` in one process."""
    model = make_model()

    def train() -> None:
        TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)).save({"loss": 1.0})

    options = RunConfig(storage_path=tmp_path / "runs", verbose=0)
    result = DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=0), run_config=options).fit()
    return Path(result.checkpoint.path)


def change_index(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((directory / "sharded.json").read_text())
    change(index)
    (directory / "sharded.json").write_text(json.dumps(index))


def first_part(index: dict[str, Any]) -> list[Any]:
    return index["tensors"]["model.weight"]["parts"][0]


INDEXES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file above": lambda index: first_part(index).__setitem__(2, "../__0_0.distcp"),
    "an absolute path": lambda index: first_part(index).__setitem__(2, "/etc/passwd"),
    "another file": lambda index: first_part(index).__setitem__(2, "state.pt"),
    "a file that is no string": lambda index: first_part(index).__setitem__(2, ["__0_0.distcp"]),
    "a negative offset": lambda index: first_part(index).__setitem__(3, -1),
    "a huge length": lambda index: first_part(index).__setitem__(4, 1 << 80),
    "a length beyond the file": lambda index: first_part(index).__setitem__(4, 1 << 40),
    "a part outside": lambda index: first_part(index).__setitem__(0, [1, 0]),
    "a part of another rank": lambda index: first_part(index).__setitem__(1, [2, 3, 1]),
    "no part": lambda index: index["tensors"]["model.weight"]["parts"].clear(),
    "a gap": lambda index: first_part(index).__setitem__(1, [1, 3]),
    "a part twice": lambda index: index["tensors"]["model.weight"]["parts"].append(first_part(index)),
    "a bool as a size": lambda index: first_part(index).__setitem__(0, [False, False]),
    "a fraction as a size": lambda index: index["tensors"]["model.weight"].update(shape=[2.0, 3]),
    "a huge shape": lambda index: index["tensors"]["model.weight"].update(shape=[1 << 61, 1 << 61]),
    "many dimensions": lambda index: index["tensors"]["model.weight"].update(shape=[1] * 100_000),
    "an unknown type": lambda index: index["tensors"]["model.weight"].update(dtype="Tensor"),
    "another type": lambda index: index["tensors"]["model.weight"].update(dtype="int64"),
    "another tensor": lambda index: first_part(index).__setitem__(
        slice(2, None), index["tensors"]["model.bias"]["parts"][0][2:]
    ),
    "a list of tensors": lambda index: index.update(tensors=[]),
    "another format": lambda index: index.update(format="1"),
    "no tensors": lambda index: index.pop("tensors"),
}


@pytest.mark.parametrize("change", INDEXES.values(), ids=INDEXES)
def test_hostile_index_is_refused(sharded: Path, change: Callable[[dict[str, Any]], object]) -> None:
    (sharded.parent / "__0_0.distcp").write_bytes((sharded / "__0_0.distcp").read_bytes())
    change_index(sharded, change)
    with pytest.raises(CheckpointError):
        load(sharded, make_model())


@pytest.mark.parametrize(
    "content", ["", "[", "[]", "null", "[" * 100_000, '{"format": 1, "tensors": {"model.weight": 3}}']
)
def test_index_that_is_no_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / "sharded.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"\[DT-726\].*sharded\.json: expected the index"):
        load(sharded, make_model())


@pytest.mark.parametrize("name", ["sharded.json", "state.pt", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_links_and_pipes_are_not_read(sharded: Path, name: str, kind: str) -> None:
    (sharded / name).rename(sharded.parent / name)
    if kind == "link":
        (sharded / name).symlink_to(sharded.parent / name)
    else:
        os.mkfifo(sharded / name)
    with pytest.raises(CheckpointError):
        load(sharded, make_model())


def test_pickles_are_not_loaded(sharded: Path, tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    (sharded / ".metadata").write_bytes(pickle.dumps(Canary(mark)))
    load(sharded, make_model())
    assert not mark.exists()
    for name in ("state.pt", "__0_0.distcp"):
        good = (sharded / name).read_bytes()
        torch.save({**COMMON, "sharded": Canary(mark)}, sharded / name)
        (sharded / name).write_bytes((sharded / name).read_bytes().ljust(len(good), b"\0"))
        with pytest.raises(CheckpointError):
            load(sharded, make_model())
        (sharded / name).write_bytes(good)
    assert not mark.exists()


def test_metadata_of_the_library_is_written_for_other_readers(sharded: Path) -> None:
    model = make_model()
    state = {"model": model.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id=sharded)
    other = make_model()
    load(sharded, other)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a negative step": lambda state: state.update(step=-1),
    "a step that is a tensor": lambda state: state.update(step=torch.tensor(1)),
    "no ranks": lambda state: state.update(ranks=[]),
    "a rank that is a number": lambda state: state.update(ranks=[3]),
    "data that is a list": lambda state: state["ranks"][0].update(data=[]),
    "a part of the data that is a name": lambda state: state["ranks"][0].update(part="x"),
    "positions that are a list": lambda state: state["ranks"][0]["data"].update(loaders=[1]),
    "random states of another kind": lambda state: state["ranks"][0]["random"].update(python="x"),
    "random states of torch": lambda state: state["ranks"][0]["random"].update(torch={"cpu": torch.zeros(3)}),
    "a newer format": lambda state: state.update(format=99),
    "a model that is a list": lambda state: state.update(model=[]),
    "names of another kind": lambda state: state.update(names=3),
    "an optimizer of another kind": lambda state: state.update(optimizer={"state": 3, "param_groups": 4}),
    "groups of another kind": lambda state: state["optimizer"].update(param_groups=[{"params": [7, 8]}, 3]),
    "a claim to be sharded": lambda state: state.update(sharded={"model": {}}),
    "sharded values of another kind": lambda state: state.update(sharded=3),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_hostile_state_is_refused(plain: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = torch.load(plain / "state.pt", weights_only=True)
    change(state)
    (tmp_path / "hostile").mkdir()
    torch.save(state, tmp_path / "hostile" / "state.pt")

    def resume() -> None:
        model = make_model()
        TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(TrainingFailedError, match=r"(CheckpointError|ConfigurationError): \[DT-(814|726|762)\]"):
        DataParallelTrainer(
            resume,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(storage_path=tmp_path / "resumed", verbose=0),
            resume_from_checkpoint=Checkpoint(tmp_path / "hostile"),
        ).fit()
