"""Transformers, Accelerate and DeepSpeed on a GPU."""

import tempfile
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import Checkpoint
from tests.gpu.check import Figures, Run, check, decreases, difference, equal

STEPS, SAVED = 8, 4


def make_texts(count: int = 128, length: int = 16) -> list[dict[str, Any]]:
    """Return sequences of token ids. Each of the two labels uses a different half of the vocabulary."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": (torch.randint(0, 30, (length,), generator=generator) + 30 * (number % 2)).tolist(),
            "attention_mask": [1] * length,
            "labels": number % 2,
        }
        for number in range(count)
    ]


def train_transformer(config: dict[str, Any]) -> dict[str, Any]:
    from tests.hf.trainers import losses, train

    trainer = train(config)
    model = trainer.model
    return {
        "device": trainer.args.device.type,
        "parameters": next(model.parameters()).device.type,
        "world size": trainer.args.world_size,
        "losses": list(losses(trainer.state.log_history).values()),
    }


def expect_transformer(run: Run, **arguments: Any) -> Figures:
    workers = run.workers()
    config = {"examples": make_texts(), "vocabulary": 60}
    steps = {"max_steps": SAVED, "save_strategy": "steps", "save_steps": SAVED, **arguments}
    result = run.fit(train_transformer, {**config, "arguments": steps}, workers=workers)
    longer = {**config, "arguments": {**steps, "max_steps": 4 * STEPS}}
    resumed = run.fit(train_transformer, longer, workers=workers, resume_from_checkpoint=result.checkpoint)
    for got, count in ((result.return_value, SAVED), (resumed.return_value, 4 * STEPS)):
        equal("device of the arguments", got["device"], run.device)
        equal("device of the model", got["parameters"], run.device)
        equal("world size", got["world size"], workers)
        equal("logged losses, including those in the checkpoint", len(got["losses"]), count)
    equal("reported step", resumed.metrics["step"], 4 * STEPS)
    decreases("loss", resumed.return_value["losses"])
    return {"workers": workers, "loss": f"{got['losses'][0]:.3f} -> {got['losses'][-1]:.3f}"}


@check(packages=("transformers", "accelerate"), limit_s=120)
def transformers(run: Run) -> Figures:
    """transformers.Trainer trains in bf16 and resumes from a reported checkpoint"""
    precision = {"bf16": True} if run.device == "cuda" else {}  # TrainingArguments accepts it only on a GPU
    return expect_transformer(run, **precision)


@check(packages=("transformers", "accelerate"), on_cpu=False, limit_s=120)
def transformers_in_fp16(run: Run) -> Figures:
    """transformers.Trainer trains in fp16, with its gradient scaler, and resumes"""
    return expect_transformer(run, fp16=True)


def accelerate_steps(config: dict[str, Any]) -> dict[str, Any]:
    """Train with an Accelerator and save its state after some steps, or resume from that checkpoint."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    from tests.gpu.training import make_data, make_model, make_optimizer

    plugin, options = config.get("plugin"), {}
    if plugin == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        # Without use_orig_params, FSDP1 replaces the parameters that the optimizer was created with.
        original = {"use_orig_params": True} if config["version"] == 1 else {}
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=config["version"], **original)
    elif plugin == "deepspeed":
        from accelerate.utils import DeepSpeedPlugin

        options["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=2)
    accelerator = Accelerator(**options)
    model = make_model(seed=0 if drivetrain.get_checkpoint() is None else 1)
    loader = DataLoader(TensorDataset(*make_data()), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    first, losses, devices = 0, [], set()
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            accelerator.load_state(directory)
        first = SAVED
    for number, (features, labels) in enumerate(loader):
        if number < first:
            continue
        devices |= {features.device.type, labels.device.type}
        loss = torch.nn.functional.cross_entropy(model(features), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number + 1 == SAVED and checkpoint is None:
            with tempfile.TemporaryDirectory() as directory:
                accelerator.save_state(directory)
                drivetrain.report({"loss": losses[-1]}, Checkpoint.from_directory(directory))
    return {
        "type": str(accelerator.distributed_type.value),
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "device": accelerator.device.type,
        "batches": devices,
        "losses": losses,
    }


def expect_accelerate(run: Run, kind: str, config: dict[str, Any], precision: str = "no", **options: Any) -> Figures:
    workers = run.workers()
    result = run.fit(accelerate_steps, config, workers=workers, **options)
    options = {**options, "workers": workers, "resume_from_checkpoint": result.checkpoint}
    resumed = run.fit(accelerate_steps, config, **options).return_value
    for got in (result.return_value, resumed):
        equal("distributed_type", got["type"], kind)
        equal("processes", got["processes"], workers)
        equal("mixed_precision", got["precision"], precision)
        equal("device", got["device"], run.device)
        equal("devices of the batches", got["batches"], {run.device})
    losses = result.return_value["losses"]
    decreases("loss", losses)
    return {
        "workers": workers,
        "distributed_type": kind,
        "largest difference of a loss after resuming": difference(resumed["losses"], losses[SAVED:], 1e-2),
    }


def plain_kind(run: Run) -> str:
    return "MULTI_GPU" if run.device == "cuda" else "MULTI_CPU"


@check(packages=("accelerate",))
def accelerate(run: Run) -> Figures:
    """An unchanged Accelerator() trains on the worker's GPU, and saves and loads its state"""
    return expect_accelerate(run, plain_kind(run), {})


@check(packages=("accelerate",))
def accelerate_trainer(run: Run) -> Figures:
    """AccelerateTrainer applies a configuration that was written for another machine"""
    from drivetrain_hf.accelerate import AccelerateTrainer

    config_of_another_machine = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "gpu_ids": "6,7",
        "machine_rank": 3,
        "main_process_ip": "10.11.12.13",
        "main_process_port": 29501,
        "mixed_precision": "bf16",
        "num_machines": 8,
        "num_processes": 64,
        "use_cpu": False,
    }
    options = {"trainer": AccelerateTrainer, "accelerate_config": config_of_another_machine}
    return expect_accelerate(run, plain_kind(run), {}, "bf16", **options)


@check(packages=("accelerate",), on_cpu=False)
def accelerate_with_fsdp(run: Run) -> Figures:
    """Accelerate's FSDP plugin is applied on a GPU"""
    return expect_accelerate(run, "FSDP", {"plugin": "fsdp", "version": 1})


@check(packages=("accelerate",), on_cpu=False)
def accelerate_with_fsdp2(run: Run) -> Figures:
    """Accelerate's FSDP2 plugin is applied on a GPU"""
    return expect_accelerate(run, "FSDP", {"plugin": "fsdp", "version": 2})


@check(packages=("accelerate", "deepspeed"), on_cpu=False, limit_s=150)
def accelerate_with_deepspeed(run: Run) -> Figures:
    """Accelerate's DeepSpeed plugin is applied on a GPU"""
    return expect_accelerate(run, "DEEPSPEED", {"plugin": "deepspeed"})


def deepspeed_steps(config: dict[str, Any]) -> dict[str, Any]:
    import deepspeed
    from torch.nn.functional import cross_entropy

    from drivetrain_hf.deepspeed import check_config
    from drivetrain_torch import get_device
    from tests.gpu.training import make_model, make_optimizer, own_part

    if get_device().type == "cpu":  # otherwise it compiles an operation for half a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings = {
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": config["stage"]},
        "zero_allow_untested_optimizer": True,
    }
    model = make_model(seed=0 if drivetrain.get_checkpoint() is None else 1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=check_config(settings))
    features, labels = own_part(engine.device)
    losses: list[float] = []

    def train(steps: int) -> None:
        for _ in range(steps):
            loss = cross_entropy(engine(features), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())

    if (checkpoint := drivetrain.get_checkpoint()) is None:
        train(SAVED)
        with tempfile.TemporaryDirectory() as directory:
            engine.save_checkpoint(directory, client_state={"steps": SAVED})
            drivetrain.report({"loss": losses[-1]}, Checkpoint.from_directory(directory))
    else:
        with checkpoint.as_directory() as directory:
            _, state = engine.load_checkpoint(str(Path(directory)))
        equal("steps in the checkpoint", state["steps"], SAVED)
    train(STEPS - SAVED)
    return {"device": engine.device.type, "stage": engine.zero_optimization_stage(), "losses": losses}


def expect_deepspeed(run: Run, stage: int) -> Figures:
    workers = run.workers()
    result = run.fit(deepspeed_steps, {"stage": stage}, workers=workers)
    options = {"workers": workers, "resume_from_checkpoint": result.checkpoint}
    resumed = run.fit(deepspeed_steps, {"stage": stage}, **options).return_value
    got = result.return_value
    equal("device", (got["device"], resumed["device"]), (run.device, run.device))
    equal("stage", got["stage"], stage)
    decreases("loss", got["losses"])
    largest = difference(resumed["losses"], got["losses"][SAVED:], 1e-3)
    return {"workers": workers, "largest difference of a loss after resuming": largest}


@check(packages=("deepspeed",), limit_s=150)
def deepspeed_zero_1(run: Run) -> Figures:
    """DeepSpeed ZeRO stage 1 trains, saves and resumes"""
    return expect_deepspeed(run, 1)


@check(packages=("deepspeed",), limit_s=150)
def deepspeed_zero_2(run: Run) -> Figures:
    """DeepSpeed ZeRO stage 2 trains, saves and resumes"""
    return expect_deepspeed(run, 2)


@check(packages=("deepspeed",), limit_s=150)
def deepspeed_zero_3(run: Run) -> Figures:
    """DeepSpeed ZeRO stage 3 trains, saves and resumes"""
    return expect_deepspeed(run, 3)
