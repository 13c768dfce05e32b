"""Sharded checkpoints: several processes save their own parts, and the same number or fewer load them."""

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch
from torch.distributed.device_mesh import init_device_mesh

import drivetrain
from drivetrain import Checkpoint, CheckpointError, Result, TrainingFailedError
from drivetrain_torch import TrainState, prepare_model
from tests.torch.conftest import gather
from tests.torch.sharded import load, save

STRATEGIES = ["ddp", "fsdp", "fully_shard"]
STEPS = 6
SAVED = 3


def make_model(seed: int = 7, hidden: int = 8, layers: int = 1) -> torch.nn.Sequential:
    """Return a small model. When it is sharded over four ranks, some ranks have no part of the last layer."""
    torch.manual_seed(seed)
    more = [torch.nn.Linear(2, 2) for _ in range(layers - 1)]
    return torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 2), *more)


def parallelize(model: torch.nn.Sequential, strategy: str) -> torch.nn.Module:
    if strategy != "fully_shard":
        return prepare_model(model, parallel_strategy=strategy)
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> float:
    """Train on this rank's part of a batch of eight; return the loss of the whole batch."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[rank::size]
    optimizer.zero_grad()
    loss = (model(batch) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return sum(gather(loss.item())) / size if size > 1 else loss.item()


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Return the unsharded state of the model and of the optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))


def assert_identical(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(actual[1]["state"], expected[1]["state"], rtol=0, atol=0)
    assert actual[1]["param_groups"] == expected[1]["param_groups"]


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train and save half-way, or resume from that checkpoint. Warnings are errors."""
    checkpoint = drivetrain.get_checkpoint()
    model = parallelize(make_model(seed=7 if checkpoint is None else 8), config["strategy"])
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    outcome: dict[str, Any] = {"losses": []}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = TrainState(model, optimizer, scheduler)
        for step in range(state.steps, STEPS):
            if step == SAVED:
                outcome["state"] = whole_state(model, optimizer)
                if not state.is_restored:
                    state.save()
            outcome["losses"].append(train_step(model, optimizer, step))
            scheduler.step()
            state.step()
    return outcome


def assert_each_rank_wrote_its_part(checkpoint: Checkpoint, ranks: int) -> None:
    with checkpoint.as_directory() as directory:
        files = {file.name: file.stat().st_size for file in Path(directory).iterdir()}
    parts = [f"__{rank}_0.distcp" for rank in range(ranks)]
    assert set(files) == {".checkpoint.json", ".metadata", "sharded.json", "state.pt", *parts}
    assert all(files.values())


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, [2]), (4, [2, 1])])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_resumes_with_exactly_the_state_that_was_saved(
    fit: Callable[..., Result], strategy: str, saved_by: int, loaded_by: list[int]
):
    undisturbed = fit(train, {"strategy": strategy}, workers=saved_by)
    if strategy != "ddp":
        assert_each_rank_wrote_its_part(undisturbed.checkpoint, saved_by)
    for workers in loaded_by:
        resumed = fit(train, {"strategy": strategy}, workers=workers, resume_from_checkpoint=undisturbed.checkpoint)
        assert_identical(resumed.return_value["state"], undisturbed.return_value["state"])
        assert resumed.return_value["losses"] == pytest.approx(undisturbed.return_value["losses"][SAVED:], abs=1e-6)


@pytest.mark.parametrize("strategy", ["fsdp", "fully_shard"])
def test_model_without_an_optimizer_is_saved_whole(fit: Callable[..., Result], strategy: str):
    def train(config: dict[str, Any]) -> None:
        TrainState(parallelize(make_model(), config["strategy"])).save()

    model = make_model(seed=8)
    TrainState(model).load(fit(train, {"strategy": strategy}).checkpoint)
    torch.testing.assert_close(model.state_dict(), make_model().state_dict(), rtol=0, atol=0)


def test_model_is_saved_and_loaded_after_an_evaluation(fit: Callable[..., Result]):
    """A forward pass without a backward pass leaves the whole parameters in a module of ``fully_shard``."""

    def train(config: dict[str, Any]) -> tuple[Any, Any]:
        model = prepare_model(make_model(), parallel_strategy="fsdp2")
        optimizer = make_optimizer(model)
        state = TrainState(model=model, optimizer=optimizer)
        train_step(model, optimizer)
        expected = whole_state(model, optimizer)
        evaluate(model)
        state.save()
        train_step(model, optimizer)
        evaluate(model)
        state.load(drivetrain.get_checkpoint())
        return expected, whole_state(model, optimizer)

    def evaluate(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model(torch.ones(1, 4))

    expected, loaded = fit(train, {}).return_value
    torch.testing.assert_close(loaded[0], expected[0], rtol=0, atol=0)


def test_checkpoint_of_one_strategy_is_loaded_by_another_and_by_a_plain_module(fit: Callable[..., Result]):
    saved = fit(train, {"strategy": "fsdp"})
    other = fit(train, {"strategy": "fully_shard"}, resume_from_checkpoint=saved.checkpoint)
    assert_identical(other.return_value["state"], saved.return_value["state"])
    model = make_model(seed=8)
    TrainState(model).load(saved.checkpoint)
    torch.testing.assert_close(dict(model.state_dict()), saved.return_value["state"][0], rtol=0, atol=0)


def test_values_that_differ_between_ranks_are_saved_from_rank_0(fit: Callable[..., Result], tmp_path: Path):
    def train(config: dict[str, Any]) -> list[Any]:
        rank = dist.get_rank()
        model = prepare_model(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
        model.module[1].running_mean.fill_(rank)
        model.module[1].running_var.fill_(rank)
        save(config["directory"], model, make_optimizer(model))
        load(config["directory"], model)
        return gather([float(buffer.sum()) for buffer in model.buffers()])

    assert fit(train, {"directory": tmp_path / "shared"}).return_value == [[0.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_single_worker_can_save_and_load(fit: Callable[..., Result], workers: int):
    saved = fit(train, {"strategy": "ddp"}, workers=workers)
    resumed = fit(train, {"strategy": "ddp"}, workers=workers, resume_from_checkpoint=saved.checkpoint)
    assert_identical(resumed.return_value["state"], saved.return_value["state"])
    assert resumed.return_value["losses"] == saved.return_value["losses"][SAVED:]


def one_adam(model: torch.nn.Sequential) -> list[torch.optim.Optimizer]:
    return [make_optimizer(model)]


def plain_sgd(model: torch.nn.Sequential) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def groups(model: torch.nn.Sequential) -> list[torch.optim.Optimizer]:
    first = {"params": model[0].parameters(), "lr": torch.tensor(0.2)}
    return [torch.optim.Adam([first, {"params": model[2].parameters(), "weight_decay": 0.1}])]


def one_for_each_layer(model: torch.nn.Sequential) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)]


def none(model: torch.nn.Sequential) -> list[torch.optim.Optimizer]:
    return []


@pytest.mark.parametrize("trained_layers", [0, 1, 2])
@pytest.mark.parametrize("make", [one_adam, plain_sgd, groups, one_for_each_layer, none])
def test_state_of_any_kind_of_optimizer_is_restored(
    tmp_path: Path, make: Callable[..., list[torch.optim.Optimizer]], trained_layers: int
):
    model = make_model()
    optimizers = make(model)
    parameters = list(model.parameters())[: 2 * trained_layers]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    save(tmp_path, model, *optimizers)
    other_model = make_model(seed=8)
    others = make(other_model)
    train_step(other_model, plain_sgd(other_model)[0])
    load(tmp_path, other_model, *others)
    torch.testing.assert_close(other_model.state_dict(), model.state_dict(), rtol=0, atol=0)
    for loaded, original in zip(others, optimizers, strict=True):
        torch.testing.assert_close(loaded.state_dict(), original.state_dict(), rtol=0, atol=0)


def test_model_can_be_loaded_alone_from_a_checkpoint_with_an_optimizer(tmp_path: Path):
    model = make_model()
    save(tmp_path, model, make_optimizer(model))
    other = make_model(seed=8)
    load(tmp_path, other)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The directory of a checkpoint of the model and of Adam."""
    model = make_model()
    save(tmp_path / "saved", model, make_optimizer(model))
    return tmp_path / "saved"


def assert_refused(directory: Path, message: str, model: torch.nn.Module | None = None, *optimizers: Any) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load(directory, model or make_model(), *optimizers)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_directory_that_is_not_a_sharded_checkpoint_is_refused(tmp_path: Path):
    expected = r"\[DT-814\] TrainState: expected a checkpoint written by TrainState\.save, got"
    assert_refused(tmp_path / "nothing", rf"{expected} .*/nothing")
    save_with_torch({"model": make_model().state_dict()}, checkpoint_id=tmp_path)
    assert_refused(tmp_path, rf"{expected} .* state\.pt")
    save(tmp_path / "saved", make_model())
    index = tmp_path / "saved" / "sharded.json"
    index.unlink()
    assert_refused(tmp_path / "saved", r"\[DT-726\] .*/saved: expected the index of a sharded checkpoint, got none")
    index.write_text("{}")
    assert_refused(tmp_path / "saved", r"\[DT-726\] .*sharded\.json: expected the index of .*, got a damaged")


def test_missing_or_truncated_file_is_named(saved: Path):
    message = r"saved: .*, got missing or truncated files: __0_0\.distcp\. Make every rank report"
    file = Path(saved, "__0_0.distcp")
    os.truncate(file, file.stat().st_size - 1)
    assert_refused(saved, message)
    file.unlink()
    assert_refused(saved, message)


def test_damaged_file_is_reported_with_the_error_of_torch(saved: Path):
    file = Path(saved, "__0_0.distcp")
    file.write_bytes(b"x" * file.stat().st_size)
    assert_refused(saved, "could not read .*saved: rank 0 raised ")


def test_checkpoint_of_another_model_is_refused_with_the_differences(saved: Path):
    expected = r"\[DT-814\] TrainState: expected a checkpoint of this state, got .*/saved"
    remedy = r"\. Create the TrainState with the same parts"
    assert_refused(saved, rf"{expected} without model\.3\.weight, model\.3\.bias{remedy}", make_model(layers=2))
    assert_refused(saved, rf"{expected} with model\.2\.weight, model\.2\.bias{remedy}", make_model()[:1])
    assert_refused(saved, rf"{expected} with model\.0\.weight of shape \(8, 4\), not \(9, 4\), ", make_model(hidden=9))


def test_checkpoint_of_another_optimizer_is_refused_with_the_differences(saved: Path):
    model = make_model()
    names = r"optimizer\.state\.0\.weight\.{}, .* and {} more"
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    differences = rf"without {names.format('momentum_buffer', 1)}; with {names.format('step', 9)}\. Create"
    assert_refused(saved, f"expected a checkpoint of this state, got .*/saved {differences}", model, momentum)
    assert_refused(saved, r"with optimizer\.state\.2\.weight", model, torch.optim.AdamW(model[0].parameters()))
    save(saved / "sgd", model, *plain_sgd(model))
    assert_refused(saved / "sgd", r"without optimizer\.state\.0\.weight\.step", model, make_optimizer(model))
    save(saved / "alone", model)
    assert_refused(saved / "alone", r"/alone without optimizer\.", model, make_optimizer(model))


def test_directory_with_a_checkpoint_is_not_written_to(saved: Path):
    with pytest.raises(CheckpointError, match=r"expected a directory without a checkpoint, got one in .*/saved\. Use"):
        save(saved, make_model())


def test_error_on_all_ranks_names_the_rank_that_could_not_write(fit: Callable[..., Result], tmp_path: Path):
    def train(config: dict[str, Any]) -> list[str]:
        directory = config["file"] / "under" if dist.get_rank() else config["directory"]
        with pytest.raises(CheckpointError) as caught:
            save(directory, make_model())
        return gather(str(caught.value))

    file = tmp_path / "file"
    file.touch()
    first, second = fit(train, {"file": file, "directory": tmp_path / "directory"}).return_value
    assert first == second
    assert "could not write the checkpoint: rank 1 raised NotADirectoryError" in first


def test_resuming_from_a_checkpoint_with_a_missing_file_fails_with_its_name(fit: Callable[..., Result]):
    saved = fit(train, {"strategy": "fully_shard"})
    Path(saved.checkpoint.path, "__1_0.distcp").unlink()
    with pytest.raises(TrainingFailedError, match=r"missing or truncated files: __1_0\.distcp") as caught:
        fit(train, {"strategy": "fully_shard"}, resume_from_checkpoint=saved.checkpoint)
    assert isinstance(caught.value.__cause__, CheckpointError)
