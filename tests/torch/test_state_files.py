"""The files of ``TrainState``: what is in them, who can read them, and what is refused."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import drivetrain
from drivetrain import Checkpoint, CheckpointError, ConfigurationError, Result, SessionError, TrainingFailedError
from drivetrain_torch import TrainState, prepare_model

Fit = Callable[..., Result]


class Tied(torch.nn.Module):
    """A model whose two layers share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(batch)))


def save_in_run(fit: Fit, make: Callable[[], TrainState], workers: int = 0) -> Checkpoint:
    """Save a state in a run of its own, and return the checkpoint."""
    return fit(lambda: make().save({"loss": 1.0}), workers=workers).checkpoint


def read(checkpoint: Checkpoint) -> Any:
    return torch.load(Path(checkpoint.path, "state.pt"), weights_only=True)


def as_values(state: Any) -> Any:
    """Return a state with lists in place of tensors, so that it can be compared."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: as_values(value) for key, value in state.items()}
    return [as_values(value) for value in state] if isinstance(state, (list, tuple)) else state


def step(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_file_is_read_without_drivetrain_and_has_the_names_of_the_plain_model(fit: Fit):
    def train() -> None:
        plain = Tied()
        model = torch.compile(prepare_model(plain), backend="eager")
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer)
        TrainState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), ema=AveragedModel(plain)).save()

    checkpoint = fit(train, workers=2).checkpoint
    assert [name for name in os.listdir(checkpoint.path) if not name.startswith(".")] == ["state.pt"]
    saved = read(checkpoint)
    assert {*saved} == {"model", "optimizer", "scheduler", "ema", "step", "epoch", "ranks", "format", "names"}
    model = Tied()
    model.load_state_dict(saved["model"])
    assert saved["model"]["first.weight"].data_ptr() == saved["model"]["second.weight"].data_ptr()
    torch.optim.Adam(model.parameters()).load_state_dict(saved["optimizer"])
    AveragedModel(model).load_state_dict(saved["ema"])
    assert len(saved["ranks"]) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_all_kinds_of_parts_are_restored_on_a_plain_model(fit: Fit, count: int):
    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        model = Tied()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(count)]
        schedulers = {
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 1.0, total_steps=9),
            "later": torch.optim.lr_scheduler.MultiStepLR(optimizers[-1], [1, 2, 2]),
        }
        step(model, *optimizers)
        optimizer = optimizers if count > 1 else optimizers[0]
        return {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu"), **schedulers}

    def states(parts: dict[str, Any]) -> list[Any]:
        lists = [part if isinstance(part, list) else [part] for part in parts.values()]
        return [as_values(each.state_dict()) for part in lists for each in part]

    def train() -> Any:
        parts = make()
        if drivetrain.get_checkpoint() is not None:
            with torch.no_grad():
                parts["model"].first.weight.zero_()
        else:
            parts["scaler"].scale(torch.ones(1))
            parts["scaler"].update(2.0)
            parts["scheduler"].step()
        state = TrainState(**parts)
        if not state.is_restored:
            state.save()
        return states(parts)

    saved = fit(train, workers=0)
    resumed = fit(train, workers=0, resume_from_checkpoint=saved.checkpoint)
    assert resumed.return_value == saved.return_value


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("ddp", "fsdp2"), ("fsdp2", "ddp"), ("fsdp", "fsdp2")])
def test_checkpoint_is_restored_with_another_strategy(fit: Fit, saved_by: str, loaded_by: str):
    def train(config: dict[str, Any]) -> list[Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        warnings.simplefilter("ignore")
        torch.manual_seed(drivetrain.get_checkpoint() is not None)
        model = prepare_model(
            torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), parallel_strategy=config["strategy"]
        )
        optimizer = torch.optim.Adam(model.parameters())
        state = TrainState(model, optimizer)
        if not state.is_restored:
            step(model, optimizer)
            state.save()
        return list(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))

    saved = fit(train, {"strategy": saved_by})
    restored = fit(train, {"strategy": loaded_by}, resume_from_checkpoint=saved.checkpoint)
    alone = fit(train, {"strategy": loaded_by}, workers=1, resume_from_checkpoint=saved.checkpoint)
    for result in (restored, alone):
        torch.testing.assert_close(result.return_value[0], saved.return_value[0], rtol=0, atol=0)
        torch.testing.assert_close(result.return_value[1]["state"], saved.return_value[1]["state"], rtol=0, atol=0)


def test_parameters_are_loaded_without_a_run(fit: Fit):
    model = Tied()
    checkpoint = save_in_run(fit, lambda: TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    other = Tied()
    state = TrainState(other)
    assert not state.load(checkpoint)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert (state.steps, state.is_restored) == (0, False)


def test_loading_that_is_not_strict_returns_the_differences(fit: Fit):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 2))
    checkpoint = save_in_run(fit, lambda: TrainState(model))
    other = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Linear(4, 5), torch.nn.Identity(), torch.nn.Linear(2, 1)
    )
    state = TrainState(other)
    differences = state.load(checkpoint, strict=False)
    assert differences.missing == ["model.3.weight", "model.3.bias"]
    assert differences.unexpected == ["model.2.weight", "model.2.bias"]
    assert differences.reshaped == [
        "model.1.weight of shape (2, 4), not (5, 4)",
        "model.1.bias of shape (2,), not (5,)",
    ]
    assert torch.equal(other[0].weight, model[0].weight)
    with pytest.raises(
        CheckpointError, match=r"\[DT-814\].*without model\.3\.weight, model\.3\.bias; with model\.2\.w.*"
    ):
        state.load(checkpoint)


def restore(fit: Fit, checkpoint: Checkpoint, make: Callable[[], TrainState], message: str) -> None:
    with pytest.raises(TrainingFailedError, match=message):
        fit(lambda: make() and None, workers=0, resume_from_checkpoint=checkpoint)


def test_checkpoint_of_other_parts_is_refused_with_the_differences(fit: Fit):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint = save_in_run(fit, lambda: TrainState(model, optimizer, extra=torch.nn.Linear(1, 1)))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    message = (
        r"\[DT-814\] TrainState: expected a checkpoint of this state, got .* without scheduler; with extra\. Create"
    )
    restore(fit, checkpoint, lambda: TrainState(model, optimizer, scheduler), message)
    bias = torch.optim.Adam([model.bias])
    restore(
        fit,
        checkpoint,
        lambda: TrainState(model, bias, extra=torch.nn.Linear(1, 1)),
        r"with optimizer of model\.weight\.",
    )
    swapped = torch.optim.Adam([model.bias, model.weight])
    restore(fit, checkpoint, lambda: TrainState(model, swapped, extra=torch.nn.Linear(1, 1)), "in another order")
    groups = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}])
    restore(fit, checkpoint, lambda: TrainState(model, groups, extra=torch.nn.Linear(1, 1)), "cannot be loaded")


def test_checkpoint_of_other_code_is_refused(fit: Fit, tmp_path: Path):
    (tmp_path / "own").mkdir()
    torch.save({"model": {}, "epoch": 3}, tmp_path / "own" / "state.pt")
    make = lambda: TrainState(torch.nn.Linear(1, 1))  # noqa: E731
    restore(
        fit, Checkpoint(tmp_path / "own"), make, r"\[DT-814\].*which other code has written\. Load it with that code"
    )
    (tmp_path / "own" / "state.pt").rename(tmp_path / "own" / "model.pt")
    restore(fit, Checkpoint(tmp_path / "own"), make, r"\[DT-814\].* without state\.pt\. Load it")


class Counter:
    """A part with a state of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"rest": [1, 2], "values": {"best": [0, self.value]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["values"]["best"][1]


@pytest.mark.parametrize("value", [Path("/model"), lambda: 0])
def test_first_save_names_the_entry_that_could_not_be_loaded(fit: Fit, value: Any):
    message = r"\[DT-813\].*weights_only=True.* in counter\['values'\]\['best'\]\[1\]\. Change the state_dict\(\)"
    with pytest.raises(TrainingFailedError, match=message):
        save_in_run(fit, lambda: TrainState(torch.nn.Linear(1, 1), counter=Counter(value)))


def test_objects_without_a_state_and_reserved_names_are_refused():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(
        ConfigurationError, match=r"\[DT-812\] TrainState\(best=\.\.\.\): expected an object with .*0\.5"
    ):
        TrainState(model, best=0.5)
    with pytest.raises(ConfigurationError, match=r"\[DT-812\] TrainState\(epoch=\.\.\.\): expected another name"):
        TrainState(model, epoch=Counter(0))
    with pytest.raises(ConfigurationError, match=r"loader=.*Pass the loader that prepare_data_loader returns"):
        TrainState(model, loader=torch.utils.data.DataLoader([1, 2]))


def test_state_counts_without_a_run_and_save_is_refused_as_report_is():
    state = TrainState(torch.nn.Linear(1, 1), sampler=(sampler := EpochsOnly()))
    for _ in state.epochs(2):
        state.step()
    assert (state.steps, state.epoch, state.stopping, sampler.epochs) == (2, 2, False, [0, 1])
    with pytest.raises(SessionError, match=r"\[DT-801\] report\(\): expected a call inside a train function"):
        state.save({"loss": 1.0})
    with pytest.raises(SessionError, match=r"\[DT-805\] TrainState\.save\(\): expected no checkpoint_ranks"):
        state.save({"loss": 1.0}, checkpoint_ranks="all")


class EpochsOnly:
    """A sampler without a position."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_options_of_report_are_passed_on(fit: Fit):
    def train() -> None:
        state = TrainState(torch.nn.Linear(1, 1))
        state.save({"loss": 1.0}, checkpoint_dir_name="first", wait=True)
        state.save(loss=2.0, checkpoint_upload_mode="async")

    result = fit(train, workers=2)
    assert [Path(found.path).name for found, _ in result.best_checkpoints] == ["first", "checkpoint_000002"]
    assert result.metrics["loss"] == 2.0


def test_save_inside_an_epoch_without_a_known_loader_counts_the_epoch_as_complete(fit: Fit):
    def train() -> tuple[int, list[int]]:
        state = TrainState(torch.nn.Linear(1, 1), sampler=EpochsOnly())
        done = state.steps, []
        for epoch in state.epochs(3):
            done[1].append(epoch)
            state.step()
            state.save()
            if not state.is_restored and epoch == 1:
                break
        return done

    stopped = fit(train, workers=0)
    assert stopped.return_value == (0, [0, 1])
    assert fit(train, workers=0, resume_from_checkpoint=stopped.checkpoint).return_value == (2, [2])
