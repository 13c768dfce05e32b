"""Training state as one object: the half that knows no framework.

:class:`BaseTrainState` counts steps and epochs, saves the random states and the data positions of every rank, and ends
the train function at the step that all ranks have agreed on. :class:`StateFiles` is what a framework's plugin adds: how
the named parts, such as the parameters of a model, are written to files and read from them.

Next to its parts, a checkpoint contains the *common entries*: a mapping with the keys of :data:`COMMON_ENTRIES`. They
consist of numbers, strings, containers of them, and tensors in the states that frameworks and loaders return.
"""

from __future__ import annotations

import os
import secrets
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from drivetrain._base.mesh import DataPosition
from drivetrain._plugins.frameworks import random_states, restore_random_states
from drivetrain._storage.checkpoint import Checkpoint
from drivetrain._storage.node import share_directory
from drivetrain._worker.positions import EpochPhase, Positions
from drivetrain._worker.preemption import StopTraining
from drivetrain._worker.session import Session, current_session, report
from drivetrain.errors import CheckpointError, ConfigurationError, SessionError

__all__ = [
    "COMMON_ENTRIES",
    "BaseTrainState",
    "Differences",
    "StateFiles",
    "check_common_entries",
    "check_names",
    "check_parts",
]

FORMAT = 1
"""The version of the common entries. Later versions read earlier ones."""

COMMON_ENTRIES = ("step", "epoch", "ranks", "format", "names", "sharded")
"""The keys of the common entries, which no part may use as its name. ``names`` and ``sharded`` are
for the plugin of the framework."""


class Differences(NamedTuple):
    """How the entries of a checkpoint differ from those of a training state.

    Attributes:
        missing: the entries of the state that the checkpoint does not have.
        unexpected: the entries of the checkpoint that the state does not have.
        reshaped: the entries of both whose shapes differ, with both shapes.
    """

    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]

    def __bool__(self) -> bool:
        return any(self[:])

    def __str__(self) -> str:
        sides = [("without", self.missing), ("with", self.unexpected), ("with", self.reshaped)]
        return "; ".join(f"{side} {_join(names)}" for side, names in sides if names)


class StateFiles(ABC):
    """Writes and reads the parts of a training state. The plugin of a framework derives a class from it."""

    @property
    @abstractmethod
    def is_written_by_all_ranks(self) -> bool:
        """True if every rank writes a part of the checkpoint, False if rank 0 writes all of it."""

    @property
    def data_position(self) -> DataPosition | None:
        """The part of the data that this rank reads, if it shares the part with other ranks; None if unknown."""
        return None

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in the order of the ranks, on every rank.

        Args:
            value: the value of this rank, made of numbers, strings, containers of them, and tensors.

        Returns:
            A list with the value of this rank alone if the ranks are not connected.
        """

    @abstractmethod
    def write(self, directory: str, common: Mapping[str, Any], *, verify: bool) -> None:
        """Write the files of this rank.

        Called on the ranks that contribute to the checkpoint.

        Args:
            directory: an empty directory, not shared with other ranks.
            common: the common entries, which rank 0 writes.
            verify: True to read back what was written. It is set for the first checkpoint of an attempt.

        Raises:
            CheckpointError: an entry could not be read back. The message names the entry.
        """

    @abstractmethod
    def read(self, directory: str, *, only_parameters: bool, strict: bool) -> tuple[Any, Differences]:
        """Read a checkpoint, and load its parts.

        Called on every rank.

        Args:
            directory: the directory of the checkpoint, which may come from an untrusted source.
            only_parameters: True to load only models and other parts with parameters, and those that exist on both
                sides; False to load all parts.
            strict: True to raise an error if the entries differ; False to load the entries that agree.

        Returns:
            The common entries, which the caller checks, and the differences.

        Raises:
            CheckpointError: the files are damaged, were written by other code, or have other entries.
        """


class BaseTrainState:
    """The state of a training on one rank. The plugins of frameworks derive their ``TrainState`` from this class.

    A derived class creates a :class:`StateFiles` of its parts, passes it to the constructor, and then calls
    :meth:`restore`.

    Args:
        files: writes and reads the parts.
        loaders: data loaders and samplers by name, whose positions are saved for each rank. Each has ``state_dict`` and
            ``load_state_dict``, or ``set_epoch``, or all three.

    Attributes:
        steps: the number of calls of :meth:`step`, including those before the state was restored.
        epoch: the number of completed epochs: the number of the current epoch inside :meth:`epochs`.
        is_restored: True if the state was restored from a checkpoint when it was created.
    """

    def __init__(self, files: StateFiles, loaders: Mapping[str, Any]) -> None:
        session = current_session()
        self.steps = 0
        self.epoch = 0
        self.is_restored = False
        self._files = files
        self._session = session
        self._poll = (lambda: None) if session is None else session.preemption.poll
        self._positions = Positions(loaders, {} if session is None else session.resumable_shards())
        self._data_position = _data_position(files, session)
        self._require_own_shards()
        self._restored: _RankState | None = None
        self._is_stopping = False
        self._has_saved = False

    @property
    def stopping(self) -> bool:
        """True if a preemption notice has arrived, so that the train function is about to end.

        :meth:`step` ends the train function at once, unless the epoch has just been completed: then the code after the
        loop over the batches is still executed, up to the next :meth:`save`. This code can skip a long validation.
        """
        return self._is_stopping

    def restore(self) -> None:
        """Restore everything from the checkpoint that the worker has received. Without one, do nothing.

        Raises:
            CheckpointError: the checkpoint was not written by :meth:`save`, is damaged, or has other entries.
            ConfigurationError: a loader or a dataset cannot continue from its position.
        """
        checkpoint = None if self._session is None else self._session.checkpoint
        if checkpoint is None:
            return
        with checkpoint.as_directory() as directory:
            found, _ = self._files.read(directory, only_parameters=False, strict=True)
            common = check_common_entries(found, directory)
        self.steps, self.epoch = common["step"], common["epoch"]
        self._restored = self._own_state(common["ranks"])
        self._restore_rank()
        self.is_restored = True

    def load(self, checkpoint: Checkpoint, *, strict: bool = True) -> Differences:
        """Load the parameters of a checkpoint, for an evaluation or to continue from another training.

        Only models and other modules are loaded, by their names: not the optimizer, the counters, the random states or
        the positions. Every rank calls this function. After a retry, the state has already been restored from a newer
        checkpoint: call it only if :attr:`is_restored` is False.

        Args:
            checkpoint: a checkpoint that :meth:`save` has written, on any number of workers.
            strict: True to raise an error if the entries of a module differ; False to load those that agree.

        Returns:
            The entries that were not loaded.

        Raises:
            CheckpointError: the checkpoint was not written by :meth:`save`, is damaged, or has other entries.
        """
        with checkpoint.as_directory() as directory:
            found, differences = self._files.read(directory, only_parameters=True, strict=strict)
            check_common_entries(found, directory)
        return differences

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are not complete, and pass them to the loaders' ``set_epoch``.

        The first epoch has the number 0. A restored state continues with the epoch in which it was saved. Inside an
        epoch, the loaders and dataset shards continue with the next batch.

        Args:
            count: the number of epochs of the whole training.
        """
        while self.epoch < count:
            self._begin_epoch()
            yield self.epoch
            self._positions.end_epoch()
            self.epoch += 1
            if self._is_stopping:
                self._save_and_end()

    def step(self) -> None:
        """Count a step, after which the state is consistent. Call it once per step, at its end, on every rank.

        If a preemption notice has arrived at the step on which all ranks have agreed, the state is saved, and the train
        function ends as after :func:`drivetrain.resume_later`, without further code except ``finally`` blocks. The same
        applies to Ctrl-C, to a cancelled run and to a run that continues with more workers. Otherwise, the call takes
        about a microsecond.
        """
        self.steps += 1
        if self._poll() is not None:
            self._on_notice()

    def save(self, metrics: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Report metrics, with a checkpoint of the state. Every rank calls this function.

        Args:
            metrics: as for :func:`drivetrain.report`.
            **options: the other arguments of :func:`drivetrain.report`, except those that describe the checkpoint.

        Raises:
            SessionError: the call is outside a train function, or an argument is invalid.
            CheckpointError: the first checkpoint of the attempt could not be read back; the message names the entry.
            StorageError: the checkpoint could not be stored.
        """
        if described := [name for name in ("checkpoint", "checkpoint_ranks") if name in options]:
            raise SessionError(
                f"[DT-805] TrainState.save(): expected no {' and no '.join(described)}, because it saves the state "
                "itself, got one. Call drivetrain.report() to report a checkpoint of your own"
            )
        self._save(metrics, options, self._epoch_after_save())
        if self._is_stopping:
            self._end()

    def _begin_epoch(self) -> None:
        self._positions.set_epoch(self.epoch)
        if self._restored is not None and self._restored.steps == self.steps:
            # Again: set_epoch, or code since the state was created, may have changed something.
            self._positions.restore(self._restored.data, only_inside=True)
            restore_random_states(self._restored.random)
        self._restored = None
        self._positions.begin_epoch(self.steps)

    def _own_state(self, ranks: Sequence[Mapping[str, Any]]) -> _RankState:
        """Return the saved state of this rank, or of another rank that read the same part of the data.

        If the data was split into another number of parts, it has no random states.
        """
        assert self._session is not None
        rank, (part, parts) = self._session.context.get_world_rank(), self._data_position
        saved = [state.get("part", number) for number, state in enumerate(ranks)]
        if {*saved} != {*range(parts)}:
            return _RankState(self.steps, {}, ranks[0]["data"])
        own = ranks[rank if saved[rank : rank + 1] == [part] else saved.index(part)]
        return _RankState(self.steps, own["random"], own["data"])

    def _require_own_shards(self) -> None:
        """Raise an error if the driver has split the datasets differently than this rank's part of the data.

        Ranks that must read the same rows would read different ones, and train on them without an error.
        """
        given = None if self._session is None else self._session.data_position
        own = self._data_position
        if given is None or given == own or not (names := self._positions.split_shards()):
            return
        raise ConfigurationError(
            f"[DT-117] TrainState: expected part {own.part} of {own.parts} of dataset {names[0]!r}, the position of "
            f"this rank in its mesh, got part {given.part} of {given.parts}. Describe the mesh to the trainer: "
            'dataset_config=DataConfig(mesh={"dp": 2, "tp": 2}), with the names and sizes of its dimensions in order'
        )

    def _restore_rank(self) -> None:
        if self._restored is not None:
            self._positions.restore(self._restored.data)
            restore_random_states(self._restored.random)

    def _on_notice(self) -> None:
        if self._is_stopping or not self._positions.is_in_epoch:
            self._save_and_end()
        self._is_stopping = True
        if not self._positions.is_epoch_read(self.steps):
            self._save_and_end()
        # Otherwise, the code after the loop reports the epoch: a resumed run would begin with the next one.

    def _epoch_after_save(self) -> int:
        """Return the epoch with which a run continues from a checkpoint that the train function saves."""
        if not self._positions.is_in_epoch:
            return self.epoch
        is_done = self._positions.phase(self.steps) in (EpochPhase.COMPLETE, EpochPhase.UNKNOWN)
        return self.epoch + is_done

    def _save_and_end(self) -> NoReturn:
        """Save the state where it is, and end the train function."""
        self._is_stopping = True
        if self._positions.is_in_epoch and self._positions.restarts_epoch(self.steps):
            warnings.warn(
                f"TrainState: epoch {self.epoch} is saved before its end, and restarts when the run resumes, "
                "because no data loader with a position is known. Pass TrainState(loader=...), with a loader of "
                "prepare_data_loader or another one that has state_dict() and load_state_dict()",
                stacklevel=4,
            )
        self._save({"step": self.steps, "epoch": self.epoch}, {}, self.epoch)
        self._end()

    def _end(self) -> NoReturn:
        assert self._session is not None
        self._session.preemption.resume_later()
        raise StopTraining

    def _save(self, metrics: Mapping[str, Any] | None, options: Mapping[str, Any], epoch: int) -> None:
        if self._session is None:
            return report(metrics, **options)  # raises the error about a call outside a train function
        by_all = self._files.is_written_by_all_ranks
        own = {"random": random_states(), "data": self._positions.save(), "part": self._data_position.part}
        ranks = self._files.gather(own)
        if not by_all and self._session.context.get_world_rank():
            return report(metrics, **options)
        common = {"step": self.steps, "epoch": epoch, "ranks": ranks, "format": FORMAT}
        with share_directory("states", secrets.token_hex(8)) as parent:
            directory = os.path.join(parent, "state")
            os.mkdir(directory)
            self._files.write(directory, common, verify=not self._has_saved)
            self._has_saved = True
            options = {"delete_local_checkpoint_after_upload": True, **options}
            report(metrics, Checkpoint(directory), checkpoint_ranks="all" if by_all else (0,), **options)
            shutil.rmtree(directory, ignore_errors=True)
        return None


def _data_position(files: StateFiles, session: Session | None) -> DataPosition:
    """Return the part of the data that this rank reads: by default, one of its own."""
    if session is None:
        return DataPosition(0, 1)
    if (position := files.data_position or session.data_position) is not None:
        return position
    return DataPosition(session.context.get_world_rank(), session.context.get_world_size())


@dataclass(frozen=True, slots=True)
class _RankState:
    """The restored state of one rank.

    Attributes:
        steps: the number of steps when it was saved.
        random: the states of the random generators by name.
        data: the positions of loaders and shards.
    """

    steps: int
    random: Mapping[str, Any]
    data: Mapping[str, Any]


def check_parts(parts: Mapping[str, Any], *, loaders: Mapping[str, Any]) -> None:
    """Check the parts of a training state.

    Args:
        parts: objects by name, each with ``state_dict`` and ``load_state_dict``.
        loaders: data loaders and samplers by name. Those without a state require ``set_epoch``.

    Raises:
        ConfigurationError: a name is reserved, or an object cannot be saved.
    """
    check_names([*parts, *loaders])
    for name, part in {**parts, **loaders}.items():
        if all(callable(getattr(part, method, None)) for method in ("state_dict", "load_state_dict")):
            continue
        if name in loaders and callable(getattr(part, "set_epoch", None)):
            continue
        remedy = (
            "Pass the loader that prepare_data_loader returns"
            if name in loaders
            else "Add both methods to its class, or pass an object that contains it and has them"
        )
        raise ConfigurationError(
            f"[DT-812] TrainState({name}=...): expected an object with the methods state_dict and load_state_dict, got "
            f"{part!r:.200}. {remedy}"
        )


def check_names(names: Iterable[str], reserved: Sequence[str] = COMMON_ENTRIES) -> None:
    """Check the names of the parts of a training state.

    Raises:
        ConfigurationError: a name is reserved.
    """
    for name in names:
        if name in reserved:
            raise ConfigurationError(
                f"[DT-812] TrainState({name}=...): expected another name, because the state uses {name!r} itself. "
                f"The reserved names are {', '.join(reserved)}"
            )


def check_common_entries(found: object, where: str) -> dict[str, Any]:
    """Check the common entries of a checkpoint, which may come from an untrusted source.

    Args:
        found: the value that was read.
        where: the directory of the checkpoint, for the error message.

    Returns:
        The common entries.

    Raises:
        CheckpointError: they are missing or have other types, or were written by a newer version.
    """
    problem = f"[DT-814] TrainState: expected a checkpoint written by TrainState.save, got {where}"
    if not isinstance(found, Mapping) or not all(name in found for name in ("step", "epoch", "ranks", "format")):
        raise CheckpointError(
            f"{problem}, which other code has written. Load it with that code before you create the TrainState, or "
            "start a run without it"
        )
    version, ranks = found["format"], found["ranks"]
    if type(version) is int and version > FORMAT:
        raise CheckpointError(f"{problem}, which a newer version of drivetrain has written. Install that version")
    counts = [version, found["step"], found["epoch"]]
    is_intact = (
        all(type(count) is int and count >= 0 for count in counts)
        and isinstance(ranks, list)
        and len(ranks) > 0
        and all(_is_rank_state(rank) for rank in ranks)
    )
    if not is_intact:
        raise CheckpointError(f"{problem}, whose counters or states of ranks are damaged. Use another checkpoint")
    return {name: found[name] for name in COMMON_ENTRIES if name in found}


def _is_rank_state(value: object) -> bool:
    if not isinstance(value, Mapping) or not isinstance(data := value.get("data"), Mapping):
        return False
    if type(value.get("part", 0)) is not int:
        return False
    groups = [value.get("random"), *data.values()]
    return all(isinstance(group, Mapping) and all(isinstance(name, str) for name in group) for group in groups)


def _join(names: Sequence[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
