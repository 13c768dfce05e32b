"""Mixed precision: autocast and the gradient scaler, and the scaler's state in a checkpoint."""

import tempfile
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import Checkpoint
from drivetrain_torch import enable_reproducibility, get_device
from tests.gpu.check import Figures, Run, check, decreases, difference, equal

STEPS, SAVED, OVERFLOW = 12, 6, 2


def wrap(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    device = get_device()
    return DistributedDataParallel(model.to(device), device_ids=[device] if device.type == "cuda" else None)


def train_in_bf16() -> dict[str, Any]:
    import torch

    from tests.gpu.training import make_model, make_optimizer, own_part, train_steps

    device = get_device()
    model = wrap(make_model())
    types = set()

    def forward(features: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            result = model(features)
        types.add(str(result.dtype))
        return result

    losses = train_steps(model, make_optimizer(model), own_part(device), steps=30, forward=forward)
    return {"losses": losses, "types": types, "weights": {str(value.dtype) for value in model.parameters()}}


@check()
def bf16_autocast(run: Run) -> Figures:
    """A DistributedDataParallel model learns under bf16 autocast"""
    got = run.fit(train_in_bf16).return_value
    equal("dtype of the output", got["types"], {"torch.bfloat16"})
    equal("dtype of the parameters", got["weights"], {"torch.float32"})
    decreases("loss", got["losses"])
    return {"loss": f"{got['losses'][0]:.3f} -> {got['losses'][-1]:.3f}"}


def train_in_fp16() -> dict[str, Any]:
    """Train with a gradient scaler and infinite gradients in one step, from a checkpoint if there is one."""
    import torch
    from torch.nn.functional import cross_entropy

    from tests.gpu.training import make_model, make_optimizer, own_part

    device = get_device()
    enable_reproducibility()
    model = make_model()
    wrapped = wrap(model)
    optimizer, scaler = make_optimizer(wrapped), torch.amp.GradScaler(device.type, init_scale=1024.0)
    features, labels = own_part(device)
    first, losses, scales, skipped = 0, [], [], []
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        first = state["step"]
    for step in range(first, STEPS):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = cross_entropy(wrapped(features).float(), labels)
        scaler.scale(loss * (float("inf") if step == OVERFLOW else 1)).backward()
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(torch.equal(before, model[0].weight))
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        if step + 1 == SAVED:
            with tempfile.TemporaryDirectory() as directory:
                parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
                state = {**{name: part.state_dict() for name, part in parts.items()}, "step": step + 1}
                torch.save(state, Path(directory, "state.pt"))
                drivetrain.report({"loss": losses[-1]}, Checkpoint.from_directory(directory))
    return {"losses": losses, "scales": scales, "skipped": skipped}


@check()
def fp16_gradient_scaler(run: Run) -> Figures:
    """The fp16 gradient scaler skips an overflow, and its scale continues from a checkpoint"""
    result = run.fit(train_in_fp16)
    got = result.return_value
    equal("steps that changed no weight", [step for step, skipped in enumerate(got["skipped"]) if skipped], [OVERFLOW])
    equal("scales", got["scales"], [1024.0] * OVERFLOW + [512.0] * (STEPS - OVERFLOW))
    decreases("loss", got["losses"])
    resumed = run.fit(train_in_fp16, resume_from_checkpoint=result.checkpoint).return_value
    equal("scales after the checkpoint", resumed["scales"], got["scales"][SAVED:])
    largest = difference(resumed["losses"], got["losses"][SAVED:], 1e-3)
    return {"scale": got["scales"][-1], "largest difference of a loss after resuming": largest}


def convolve() -> dict[str, Any]:
    """Compare a convolution in bf16 and channels_last with float32."""
    import torch

    device = get_device()
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 30 * 30, 10)]
    model = wrap(torch.nn.Sequential(*layers).to(memory_format=torch.channels_last))
    images = torch.rand(16, 3, 32, 32).to(device, memory_format=torch.channels_last)
    exact = model(images)
    with torch.autocast(device.type, torch.bfloat16):
        rough = model(images)
    rough.float().square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return {
        "difference": (exact - rough.float()).abs().max().item(),
        "finite": all(bool(gradient.isfinite().all()) for gradient in gradients),
        "device": {gradient.device.type for gradient in gradients},
    }


@check()
def convolution_in_bf16(run: Run) -> Figures:
    """A convolution (cuDNN) in bf16 agrees with float32 and has finite gradients on the GPU"""
    got = run.fit(convolve).return_value
    assert got["difference"] < 0.02, f"difference to float32: expected less than 0.02, got {got['difference']}"
    equal("gradients are finite", got["finite"], True)
    equal("device of the gradients", got["device"], {run.device})
    return {"largest difference": got["difference"]}
