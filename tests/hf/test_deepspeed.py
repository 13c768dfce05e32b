"""DeepSpeed in runs of two processes: used directly, through Accelerate and through Transformers."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import drivetrain
from drivetrain import Checkpoint, ConfigurationError, Result, TrainingFailedError
from drivetrain_hf.accelerate import AccelerateTrainer
from drivetrain_hf.deepspeed import check_config
from tests.hf.texts import dataset
from tests.hf.trainers import losses, train

STEPS = 6


def skip_compilation() -> None:
    """Make DeepSpeed skip an optional operation whose compilation takes half a minute."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def make_engine(stage: int) -> Any:
    import deepspeed

    skip_compilation()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=check_config(config))
    assert engine.world_size == drivetrain.get_context().get_world_size()
    assert engine.zero_optimization_stage() == stage
    return engine


def train_step(engine: Any, step: int) -> float:
    """Train on this rank's part of a batch of 64 digits, and return the loss of the whole batch."""
    images, labels = load_digits(return_X_y=True)
    part = slice(step * 64 + dist.get_rank(), (step + 1) * 64, dist.get_world_size())
    loss = torch.nn.functional.cross_entropy(
        engine(torch.tensor(images[part] / 16, dtype=torch.float32)), torch.tensor(labels[part])
    )
    engine.backward(loss)
    engine.step()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def save(engine: Any, step: int) -> None:
    with TemporaryDirectory() as directory:
        engine.save_checkpoint(directory, client_state={"step": step})
        drivetrain.report({"step": step}, Checkpoint.from_directory(directory))


def load(engine: Any) -> int:
    with drivetrain.get_checkpoint().as_directory() as directory:
        _, state = engine.load_checkpoint(directory)
    return state["step"]


def train_every_stage() -> dict[int, list[float]]:
    losses_by_stage = {}
    for stage in (1, 2, 3):
        engine = make_engine(stage)
        losses_by_stage[stage] = []
        for step in range(STEPS):
            if step == STEPS // 2:
                save(engine, step)
            losses_by_stage[stage].append(train_step(engine, step))
        dist.barrier()  # until the other rank's part has been stored as well
        resumed = make_engine(stage)
        assert load(resumed) == STEPS // 2
        resumed_losses = [train_step(resumed, step) for step in range(STEPS // 2, STEPS)]
        assert resumed_losses == losses_by_stage[stage][STEPS // 2 :]
    return losses_by_stage


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of training in one process without DeepSpeed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    images, labels = load_digits(return_X_y=True)
    step_losses = []
    for step in range(STEPS):
        part = slice(step * 64, (step + 1) * 64)
        loss = torch.nn.functional.cross_entropy(
            model(torch.tensor(images[part] / 16, dtype=torch.float32)), torch.tensor(labels[part])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step_losses.append(loss.item())
    return step_losses


def test_every_stage_trains_like_one_process_and_resumes_from_a_sharded_checkpoint(
    fit: Callable[..., Result], alone: list[float]
):
    result = fit(train_every_stage)
    for stage_losses in result.return_value.values():
        assert stage_losses == pytest.approx(alone, abs=1e-4)
    assert len(result.best_checkpoints) == 3
    for checkpoint, _ in result.best_checkpoints:
        parts = [file.name for file in Path(checkpoint.path).rglob("*optim_states.pt")]
        assert sorted(parts) == [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]


def train_until_killed() -> list[float]:
    engine = make_engine(stage=2)
    first = load(engine) if drivetrain.get_checkpoint() is not None else 0
    step_losses = []
    for step in range(first, STEPS):
        step_losses.append(train_step(engine, step))
        save(engine, step + 1)
        if (step, dist.get_rank(), drivetrain.get_context().attempt) == (3, 1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
    return step_losses


def test_killed_run_resumes_with_the_losses_of_an_undisturbed_one(fit: Callable[..., Result], alone: list[float]):
    resumed = fit(train_until_killed, max_failures=1).return_value
    assert 1 <= len(resumed) <= 3
    assert resumed == pytest.approx(alone[-len(resumed) :], abs=1e-4)


ACCELERATE = {"distributed_type": "DEEPSPEED", "num_processes": 16, "num_machines": 2}


def train_through_accelerate() -> tuple[str, int, int, list[float]]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    images, labels = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(
        torch.tensor(images[: STEPS * 64] / 16, dtype=torch.float32), torch.tensor(labels[: STEPS * 64])
    )
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), loader)
    step_losses = []
    for inputs, targets in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(accelerator.reduce(loss.detach(), "mean").item())
    with TemporaryDirectory() as directory:
        accelerator.save_state(directory)
        drivetrain.report({"loss": step_losses[-1]}, Checkpoint.from_directory(directory))
    return accelerator.distributed_type.value, accelerator.num_processes, model.zero_optimization_stage(), step_losses


def test_accelerator_uses_deepspeed_from_its_config(fit: Callable[..., Result], alone: list[float], tmp_path: Path):
    (tmp_path / "deepspeed.json").write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": 3},
                "zero_allow_untested_optimizer": True,
            }
        )
    )
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**ACCELERATE, "deepspeed_config": {"deepspeed_config_file": "deepspeed.json"}}))
    result = fit(train_through_accelerate, trainer=AccelerateTrainer, accelerate_config=config)
    assert result.return_value[:3] == ("DEEPSPEED", 2, 3)
    assert result.return_value[3] == pytest.approx(alone, abs=1e-4)
    assert len(list(Path(result.checkpoint.path).rglob("*optim_states.pt"))) == 2


def train_through_transformers(config: dict[str, Any]) -> tuple[str, bool, list[dict[str, Any]]]:
    from transformers import TrainerCallback

    class KillOnce(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            context = drivetrain.get_context()
            if (context.attempt, context.get_world_rank(), state.global_step) == (0, 1, 4):
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = train(config, KillOnce())
    return (
        trainer.args.distributed_state.distributed_type.value,
        trainer.is_deepspeed_enabled,
        trainer.state.log_history,
    )


def trainer_config(**arguments: Any) -> dict[str, Any]:
    examples, vocabulary = dataset()
    deepspeed = {
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    return {"examples": examples, "vocabulary": vocabulary, "arguments": {"deepspeed": deepspeed, **arguments}}


def test_transformers_trains_with_deepspeed_and_resumes_after_a_kill(fit: Callable[..., Result]):
    arguments = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2}
    config = trainer_config(accelerator_config={"use_configured_state": True}, **arguments)
    result = fit(
        train_through_transformers, config, trainer=AccelerateTrainer, accelerate_config=ACCELERATE, max_failures=1
    )
    kind, enabled, history = result.return_value
    assert (kind, enabled) == ("DEEPSPEED", True)
    plain = fit(
        lambda config: train(config).state.log_history,
        {**config, "arguments": {**arguments, "per_device_train_batch_size": 16}},
        workers=0,
    ).return_value
    assert list(losses(history)) == list(range(1, STEPS + 1))
    assert list(losses(history).values()) == pytest.approx(list(losses(plain).values()), abs=2e-3)


def test_deepspeed_setting_that_transformers_would_ignore_is_refused(fit: Callable[..., Result]):
    message = r"TrainingArguments\(deepspeed=.*: expected a worker with GPUs.* AccelerateTrainer"
    with pytest.raises(TrainingFailedError, match=message):
        fit(train, trainer_config(max_steps=1), workers=0)


def test_auto_values_are_refused_by_name(tmp_path: Path):
    config = {"train_batch_size": "auto", "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps(config))
    for given in (config, file):
        with pytest.raises(ConfigurationError, match=r"train_batch_size, zero_optimization\.reduce_bucket_size\. Set"):
            check_config(given)
    with pytest.raises(ConfigurationError, match=r"expected a JSON file, got .*none\.json"):
        check_config(tmp_path / "none.json")
