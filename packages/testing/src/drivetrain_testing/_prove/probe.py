"""Records the state of a worker: random states, models, optimizers and schedulers, and the function's variables.

A resumed run must hold the same at the same moment. What differs has not been restored.
"""

from __future__ import annotations

import dis
import gc
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from drivetrain_testing._prove.digests import digest, is_random_generator

__all__ = ["carried_variables", "hold", "on_each_step", "restore_random", "save_random", "shuffles"]


def hold() -> dict[str, str]:
    """Return a digest of each thing that this process holds, by a name such as ``optimizer: Adam``.

    The part before the colon is one of ``random``, ``parameters``, ``buffers``, ``gradients``, ``optimizer``,
    ``settings`` (of an optimizer, such as its learning rate), ``scheduler``, ``generator`` and ``variable``.
    """
    found = {f"random: {name}": digest(state) for name, state in save_random().items()}
    torch_objects = list(_torch_objects())
    for name, value in torch_objects:
        found[_unused(name, found)] = digest(value)
    known = {id(each) for each in _torch_instances()}
    for frame in _user_frames():
        for name, value in frame.f_locals.items():
            if id(value) in known or name.startswith("__"):
                continue
            kind = "generator" if is_random_generator(value) else "variable"
            found.setdefault(f"{kind}: {name}", _safe_digest(value))
    return {name: value for name, value in found.items() if value is not None}


def _safe_digest(value: Any) -> str | None:
    try:
        return digest(value)
    except Exception:  # the methods of a user's class may raise anything
        return None


def _unused(name: str, found: dict[str, Any]) -> str:
    number = 1
    numbered = name
    while numbered in found:
        number += 1
        numbered = f"{name} {number}"
    return numbered


def _torch_kinds() -> tuple[type, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "optim"):
        return ()
    return torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.nn.Module


def _torch_instances() -> list[Any]:
    """Return the optimizers, the schedulers and the outermost modules that exist, oldest first."""
    kinds = _torch_kinds()
    if not kinds:
        return []
    # By the type, because isinstance() would run the code of lazy objects.
    instances = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    modules = [each for each in instances if issubclass(type(each), kinds[2])]
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    inner |= {id(module) for module in modules if not any(True for _ in module.parameters())}
    return [each for each in instances if id(each) not in inner]


def _torch_objects() -> Iterator[tuple[str, Any]]:
    kinds = _torch_kinds()
    for each in _torch_instances():
        name = type(each).__name__
        if issubclass(type(each), kinds[0]):
            state = each.state_dict()
            yield f"optimizer: {name}", state["state"]
            yield f"settings: {name}", state["param_groups"]
            yield f"gradients: {name}", [part.grad for group in each.param_groups for part in group["params"]]
        elif issubclass(type(each), kinds[1]):
            yield f"scheduler: {name}", {key: part for key, part in each.state_dict().items() if key[:1] != "_"}
        else:
            yield f"parameters: {name}", dict(each.named_parameters())
            if not _receives_buffers(each):
                yield f"buffers: {name}", dict(each.named_buffers())


def _receives_buffers(module: Any) -> bool:
    """Return True if a module gets the buffers of rank 0 before it is used, so that its own do not matter."""
    import torch

    kind = torch.nn.parallel.DistributedDataParallel
    return issubclass(type(module), kind) and module.broadcast_buffers and torch.distributed.get_rank() > 0


def shuffles() -> bool:
    """Return True if this process has a loader of PyTorch that shuffles its rows."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "utils") or not hasattr(torch.utils, "data"):
        return False
    samplers = (torch.utils.data.RandomSampler, torch.utils.data.DistributedSampler)
    found = [each for each in gc.get_objects() if issubclass(type(each), samplers)]
    return any(getattr(each, "shuffle", True) for each in found)


def _user_frames() -> Iterator[FrameType]:
    """Yield the frames of the user's code that called this function, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        file = frame.f_code.co_filename
        installed = "site-packages" in file or root in sys.stdlib_module_names or file.startswith("<frozen")
        if not root.startswith("drivetrain") and not (installed and root != "__main__"):
            yield frame
        frame = frame.f_back


def carried_variables() -> list[str]:
    """Return the variables that the loops of the user's code read before they assign them, which may be their state."""
    names: dict[str, None] = {}
    for frame in _user_frames():
        names.update(dict.fromkeys(_carried(frame.f_code, frame.f_lasti)))
    return list(names)


def _carried(code: CodeType, position: int) -> Iterator[str]:
    instructions = list(dis.get_instructions(code))
    loops = [
        (each.argval, each.offset)
        for each in instructions
        if "JUMP" in each.opname and isinstance(each.argval, int) and each.argval <= position <= each.offset
    ]
    if not loops:
        return
    start, end = min(loops)[0], max(stop for _, stop in loops)
    first: dict[str, str] = {}
    for each in instructions:
        if start <= each.offset <= end and "_FAST" in each.opname:
            actions = [part.partition("_")[0] for part in each.opname.replace("_FAST_", "_FAST ").split()]
            for action, name in zip(actions, _names(each.argval), strict=False):
                first.setdefault(name, action)
    yield from (name for name, action in first.items() if action == "LOAD")


def _names(argument: Any) -> list[str]:
    return [str(each) for each in argument] if isinstance(argument, tuple) else [str(argument)]


def save_random() -> dict[str, Any]:
    """Return the random states of this process as values for JSON, by the name of the library."""
    states: dict[str, Any] = {"Python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["NumPy"] = [name, keys.tolist(), *rest]
    if (torch := sys.modules.get("torch")) is not None:
        states["PyTorch"] = torch.get_rng_state().tolist()
    return states


def restore_random(states: dict[str, Any]) -> None:
    """Restore the return value of :func:`save_random`, which may have been converted to JSON and back."""
    version, internal, gauss = states["Python"]
    random.setstate((version, tuple(internal), gauss))
    if (numpy := sys.modules.get("numpy")) is not None and "NumPy" in states:
        name, keys, *rest = states["NumPy"]
        numpy.random.set_state((name, keys, *rest))
    if (torch := sys.modules.get("torch")) is not None and "PyTorch" in states:
        torch.set_rng_state(torch.tensor(states["PyTorch"], dtype=torch.uint8))


def on_each_step(call: Callable[[], None]) -> None:
    """Call a function before each step of an optimizer of PyTorch, if PyTorch is imported."""
    if not _torch_kinds():
        return
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: call())
