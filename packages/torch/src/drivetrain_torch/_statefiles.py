"""The parts of a :class:`~drivetrain_torch.TrainState`, and how they are written to files and read from them.

A checkpoint of modules that every rank has completely is one file, ``state.pt``, which rank 0 writes. Its entries are
the states of the parts, as the parts' own ``state_dict()`` returns them, and the common entries. The names in the
states of modules are those without wrappers. If a module is sharded, every rank writes the files that
:mod:`drivetrain_torch._sharded` describes. Each kind of checkpoint can be loaded into each kind of module.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from drivetrain import CheckpointError
from drivetrain.plugin.datasets import DataPosition
from drivetrain.plugin.state import COMMON_ENTRIES, Differences, StateFiles, check_parts
from drivetrain_torch._files import read_state, write_state
from drivetrain_torch._index import read_index
from drivetrain_torch._mesh import Mesh, mesh_of
from drivetrain_torch._names import find_optimizer_names, is_sharded, plain_names
from drivetrain_torch._sampling import require_part
from drivetrain_torch._sharded import SHARDED, owner_of, read_parts, reshard, without_torch_warnings, write_parts

__all__ = ["Parts", "TorchFiles"]

_NAMES = "names"
_PROBLEM = "[DT-814] TrainState: expected a checkpoint of this state, got"
_REMEDY = (
    "Create the TrainState with the same parts as when it was saved, or load the parameters that agree in a new run, "
    "with state.load(checkpoint, strict=False)"
)

OptimizerNames = list[list[list[str] | None]]
"""For each optimizer of a name, the module and the name of each parameter, in the order of its ``state_dict()``."""


@dataclass(slots=True)
class Parts:
    """The parts of a training state by name.

    Attributes:
        modules: the modules.
        optimizers: the optimizers of each name.
        lists: the names under which a list of optimizers was passed.
        loaders: the data loaders and samplers.
        others: all other parts.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Sequence[torch.optim.Optimizer]] = field(default_factory=dict)
    lists: set[str] = field(default_factory=set)
    loaders: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Parts:
        """Sort the arguments of a ``TrainState`` by their kind, and check them.

        Raises:
            ConfigurationError: an object has no state, or a name is reserved.
        """
        parts = cls()
        for name, value in values.items():
            if value is None:
                continue
            if (
                isinstance(value, (list, tuple))
                and value
                and all(isinstance(each, torch.optim.Optimizer) for each in value)
            ):
                parts.optimizers[name] = tuple(value)
                parts.lists.add(name)
            elif isinstance(value, torch.optim.Optimizer):
                parts.optimizers[name] = (value,)
            elif isinstance(value, torch.nn.Module):
                parts.modules[name] = value
            elif name in ("loader", "sampler") or isinstance(value, (DataLoader, Sampler)):
                parts.loaders[name] = value
            else:
                parts.others[name] = value
        single = {name: chosen[0] for name, chosen in parts.optimizers.items()}
        check_parts({**parts.modules, **single, **parts.others}, loaders=parts.loaders)
        return parts

    @property
    def names(self) -> list[str]:
        """The names of all parts except loaders."""
        return [*self.modules, *self.optimizers, *self.others]

    @property
    def mesh(self) -> Mesh | None:
        """The mesh with which a module or a loader was prepared; None if there is none."""
        loaders = [loader for loader in self.loaders.values() if isinstance(loader, DataLoader)]
        return mesh_of([*(each for module in self.modules.values() for each in module.modules()), *loaders])

    def optimizer_names(self, name: str) -> OptimizerNames:
        """Return the names of the parameters of the optimizers of one name."""
        found = [find_optimizer_names(optimizer, self.modules) for optimizer in self.optimizers[name]]
        return [[None if each is None else list(each) for each in names] for names in found]


class TorchFiles(StateFiles):
    """Writes and reads the parts of a training state.

    Args:
        parts: the parts.
        mesh: the mesh of all workers; None if there is none.

    Raises:
        ConfigurationError: a loader loads another part of the data than the mesh requires.
    """

    def __init__(self, parts: Parts, mesh: Mesh | None = None) -> None:
        self._parts = parts
        self._mesh = mesh
        for name, loader in parts.loaders.items():
            if mesh is not None and isinstance(loader, DataLoader):
                require_part(loader, mesh.data_position, f"TrainState({name}=...)")

    @property
    def data_position(self) -> DataPosition | None:
        """The part of the data that this rank reads; None without a mesh."""
        return None if self._mesh is None else self._mesh.data_position

    @property
    def is_written_by_all_ranks(self) -> bool:
        """True if a module is sharded, or the ranks have different stages of it."""
        has_stages = self._mesh is not None and self._mesh.stages > 1
        return has_stages or any(is_sharded(module) for module in self._parts.modules.values())

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the process group."""
        if not dist.is_available() or not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def write(self, directory: str, common: Mapping[str, Any], *, verify: bool) -> None:
        """Write the parts, and on rank 0 the common entries."""
        parts = self._parts
        reshard(parts.modules.values())
        others = {name: part.state_dict() for name, part in parts.others.items()}
        if self.is_written_by_all_ranks:
            rest = {**others, **common}
            write_parts(directory, parts.modules, parts.optimizers, rest, verify=verify, mesh=self._mesh)
            return
        modules = {name: _plain_state(module) for name, module in parts.modules.items()}
        optimizers: dict[str, Any] = {}
        for name, chosen in parts.optimizers.items():
            states = [optimizer.state_dict() for optimizer in chosen]
            optimizers[name] = states if name in parts.lists else states[0]
        names = {name: parts.optimizer_names(name) for name in parts.optimizers}
        write_state(directory, {**modules, **optimizers, **others, **common, _NAMES: names}, verify=verify)

    def read(self, directory: str, *, only_parameters: bool, strict: bool) -> tuple[Any, Differences]:
        """Read the files, and load the parts."""
        problem = f"[DT-814] TrainState: expected a checkpoint written by TrainState.save, got {directory}"
        saved = read_state(directory, problem)
        if not isinstance(saved, Mapping) or "format" not in saved:
            return saved, Differences([], [], [])  # which the caller refuses
        parts = self._parts
        reshard(parts.modules.values())
        known = {*saved, *_mapping(saved.get(SHARDED, {}), directory)} - {*COMMON_ENTRIES}
        wanted = [*parts.modules] if only_parameters else parts.names
        differences = Differences(
            missing=[name for name in wanted if name not in known],
            unexpected=[] if only_parameters else sorted(known - {*wanted}),
            reshaped=[],
        )
        _require_none(differences, directory, strict=strict)
        modules = {name: module for name, module in parts.modules.items() if name in known}
        optimizers = {} if only_parameters else parts.optimizers
        if SHARDED in saved:
            inner = _read_sharded(directory, saved[SHARDED], modules, optimizers, strict=strict, mesh=self._mesh)
        else:
            inner = _load_modules(saved, modules, directory, strict=strict)
            for name in optimizers:
                self._load_optimizers(name, saved, directory)
        for name, part in () if only_parameters else parts.others.items():
            part.load_state_dict(saved[name])
        return saved, Differences(*(mine + its for mine, its in zip(differences, inner, strict=True)))

    def _load_optimizers(self, name: str, saved: Mapping[str, Any], directory: str) -> None:
        """Load the optimizers of one name from the states that their ``state_dict()`` has returned."""
        parts, chosen = self._parts, self._parts.optimizers[name]
        states = saved[name] if name in parts.lists else [saved[name]]
        own = parts.optimizer_names(name)
        names: Any = _mapping(saved.get(_NAMES), directory).get(name)
        with _damage_as_error(directory):
            _require_none(_compare_names(name, own, names), directory, strict=True)
            for optimizer, state, names_of_state in zip(chosen, states, names, strict=True):
                if any(is_sharded(module) for module in parts.modules.values()):
                    module = parts.modules[owner_of(name, [optimizer], parts.modules)]
                    _load_into_sharded(module, optimizer, state, names_of_state)
                else:
                    optimizer.load_state_dict(state)


def _plain_state(module: torch.nn.Module) -> dict[str, Any]:
    state = module.state_dict()
    return {plain: state[name] for name, plain in plain_names(module, state).items()}


def _read_sharded(
    directory: str,
    values: Mapping[str, Any],
    modules: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
    *,
    strict: bool,
    mesh: Mesh | None,
) -> Differences:
    try:
        index = read_index(directory)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"[DT-726] {directory}: expected the index of a sharded checkpoint, got none. Use a committed checkpoint"
        ) from error
    texts = {"problem": f"{_PROBLEM} {directory}", "remedy": _REMEDY}
    return read_parts(directory, index, values, modules, optimizers, **texts, strict=strict, mesh=mesh)


def _load_modules(
    saved: Mapping[str, Any], modules: Mapping[str, torch.nn.Module], directory: str, *, strict: bool
) -> Differences:
    """Load modules from the states that they have without wrappers, and return the differences."""
    plans: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    differences = Differences([], [], [])
    for part, module in modules.items():
        states = _mapping(saved[part], directory)
        own, names = _own_state(module)
        usable: dict[str, Any] = {}
        for name, plain in names.items():
            if plain not in states:
                differences.missing.append(f"{part}.{plain}")
            elif (shape := _shape(states[plain])) != (expected := _shape(own[name])):
                differences.reshaped.append(f"{part}.{plain} of shape {shape}, not {expected}")
            else:
                usable[name] = states[plain]
        differences.unexpected.extend(f"{part}.{each}" for each in states if each not in {*names.values()})
        plans.append((module, usable))
    _require_none(differences, directory, strict=strict)
    with _damage_as_error(directory):
        for module, usable in plans:
            _load_module(module, usable)
    return differences


def _own_state(module: torch.nn.Module) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Return the entries of a module, and the names that they have without wrappers."""
    if not is_sharded(module):
        state = module.state_dict()
        return state, plain_names(module, state)
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    with without_torch_warnings():
        sharded = get_model_state_dict(module)
    return sharded, {name: name for name in sharded}


def _load_module(module: torch.nn.Module, state: dict[str, Any]) -> None:
    if not is_sharded(module):
        module.load_state_dict(state, strict=False)  # the names and shapes have been compared
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    with without_torch_warnings():
        set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, strict=False))


def _load_into_sharded(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], names: list[list[str]]
) -> None:
    """Load the state of an optimizer of whole parameters into one of sharded parameters."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    loaded: Any = {
        "state": {names[number][1]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number][1] for number in group["params"]]} for group in state["param_groups"]
        ],
    }
    optimizer.zero_grad()
    with without_torch_warnings():
        set_optimizer_state_dict(
            module, optimizer, optim_state_dict=loaded, options=StateDictOptions(full_state_dict=True, strict=False)
        )


def _compare_names(name: str, own: OptimizerNames, saved: OptimizerNames) -> Differences:
    """Return how the parameters of the optimizers of one name differ from those of the saved ones."""
    if own == saved:
        return Differences([], [], [])
    mine, its = ({tuple(each) for names in side for each in names if each is not None} for side in (own, saved))
    missing = [f"{name} of {'.'.join(each)}" for each in sorted(mine - its)]
    unexpected = [f"{name} of {'.'.join(each)}" for each in sorted(its - mine)]
    other_order = [] if missing or unexpected else [f"{name}, whose parameters are in another order"]
    return Differences(missing, unexpected, other_order)


def _require_none(differences: Differences, directory: str, *, strict: bool) -> None:
    if differences and strict:
        raise CheckpointError(f"{_PROBLEM} {directory} {differences}. {_REMEDY}")


def _mapping(value: Any, directory: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return value
    raise CheckpointError(
        f"[DT-814] TrainState: expected states by name, got {type(value).__name__} in {directory}. Use another "
        "checkpoint"
    )


def _shape(value: object) -> tuple[int, ...] | None:
    """Return the shape of a tensor; None for other values."""
    return tuple(value.size()) if isinstance(value, torch.Tensor) else None


@contextlib.contextmanager
def _damage_as_error(directory: str) -> Iterator[None]:
    """Convert the errors that other or damaged values cause in torch into a CheckpointError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{_PROBLEM} {directory}, which cannot be loaded ({error}). {_REMEDY}") from error
