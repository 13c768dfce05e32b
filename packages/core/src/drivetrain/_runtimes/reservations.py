"""Reservations of this machine's GPUs, so that several runs of a user train on different GPUs.

Each GPU has a lock file in a private directory of the user. A driver locks the files of the GPUs of its run: as the
only one or, if its workers need fractions of a GPU, together with other such runs. The kernel releases the locks when
the driver exits, however it ends. Next to a lock file, each holder describes itself in a small file.

The environment variable ``DRIVETRAIN_GPU_RESERVATIONS`` contains another path of the directory, or ``off`` to reserve
nothing.

Within a batch job, only the job's own runs are considered, because the batch system has given the job its GPUs, and may
have numbered them from 0.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from weakref import WeakSet

from drivetrain._base.descriptors import close_in_children, close_locked
from drivetrain._runtimes.base import RoomTakenError
from drivetrain._runtimes.nvml import other_processes
from drivetrain._runtimes.resources import gpus_are_selected
from drivetrain._storage.holder import boot_id, is_on_this_machine, is_running, own_facts, parse
from drivetrain._storage.node import is_file_at, machine_directory, private_directory, try_lock
from drivetrain.errors import ResourceError, StorageError

if TYPE_CHECKING:
    from drivetrain._base.interrupts import Interrupts
    from drivetrain._runtimes.base import GroupSpec

__all__ = ["GpuHolder", "Reservation", "gpu_holders", "require_free", "reserve_gpus", "reserves_gpus"]

_VARIABLE = "DRIVETRAIN_GPU_RESERVATIONS"
_OFF = "off"
_BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_LOCK = ".lock"
_FACTS = ".json"
_CHECK_S = 0.5
"""Seconds between two attempts to lock GPUs. A lock of a file cannot be waited for together with other events."""

_of_this_process: WeakSet[Reservation] = WeakSet()
"""The reservations of this process, to recognize a run that would wait for itself."""


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A run that uses a GPU.

    Attributes:
        gpu: the id of the GPU, as in ``CUDA_VISIBLE_DEVICES``.
        run: the name of the run.
        pid: the process id of its driver.
        since: the local time at which the run reserved the GPU.
    """

    gpu: str
    run: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"GPU {self.gpu}: run {self.run} (process {self.pid}, since {self.since})"


class Reservation:
    """The GPUs of a run.

    Args:
        run: the name of the run, for messages in other runs.

    Attributes:
        thread: the thread that waits for the run.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._token = secrets.token_hex(8)
        self._owner = os.getpid()
        self.thread = threading.get_ident()
        self._directory = _directory()
        self._descriptors: dict[str, int] = {}
        self._used: list[str] = []
        _of_this_process.add(self)

    @property
    def gpus(self) -> Sequence[str]:
        """The ids of the GPUs that the run has locked, or uses anyway."""
        return [*self._descriptors, *self._used]

    def take(self, gpus: Sequence[str], count: int, *, shared: bool) -> bool:
        """Reserve further GPUs, until this number is reserved. Reserve none if there are too few free ones.

        Args:
            gpus: the ids of the GPUs from which to choose, in the order in which they are tried.
            count: the number of GPUs that the run needs, including those that it has reserved already.
            shared: True to share GPUs with other runs that share them too, if there are too few other ones.

        Returns:
            True if the run has enough GPUs.
        """
        taken: list[str] = []
        for is_exclusive in (True, False) if shared else (True,):
            for gpu in gpus:
                if len(self.gpus) >= count:
                    break
                if gpu not in self.gpus and self._lock(gpu, shared=shared, as_only_one=is_exclusive):
                    taken.append(gpu)
        has_enough = len(self.gpus) >= count
        for gpu in taken:
            if has_enough:
                self._describe(gpu)
            else:
                close_locked(self._descriptors.pop(gpu))
        return has_enough

    def use_anyway(self, gpus: Sequence[str], count: int) -> None:
        """Add GPUs that other runs have reserved, until the run has this number."""
        for gpu in gpus:
            if len(self.gpus) < count and gpu not in self.gpus:
                self._used.append(gpu)
                self._describe(gpu)

    def release(self) -> None:
        """Release all GPUs. In a process that was forked from the driver, this does nothing."""
        if os.getpid() == self._owner:
            for gpu in self.gpus:
                self._release(gpu)

    def _lock(self, gpu: str, *, shared: bool, as_only_one: bool) -> bool:
        path = os.path.join(self._directory, _file_name(gpu) + _LOCK)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        close_in_children(descriptor)
        kinds = [fcntl.LOCK_EX] if as_only_one else []
        kinds += [fcntl.LOCK_SH] if shared else []  # which replaces the exclusive lock
        if not (all(try_lock(descriptor, kind) for kind in kinds) and is_file_at(descriptor, path)):
            close_locked(descriptor)
            return False
        self._descriptors[gpu] = descriptor
        return True

    def _describe(self, gpu: str) -> None:
        facts = {**own_facts(), "run": self.run, "gpu": gpu, "scope": _scope(os.environ)}
        with open(self._facts_of(gpu), "x", encoding="utf-8") as file:
            json.dump(facts, file)

    def _release(self, gpu: str) -> None:
        descriptor = self._descriptors.pop(gpu, None)
        if descriptor is None:
            self._used.remove(gpu)
        else:
            close_locked(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._facts_of(gpu))

    def _facts_of(self, gpu: str) -> str:
        return os.path.join(self._directory, f"{_file_name(gpu)}.{self._token}{_FACTS}")


def reserve_gpus(
    reservation: Reservation, spec: GroupSpec, gpus: Sequence[str], count: int, *, wait: bool, may_shrink: bool
) -> Sequence[str]:
    """Reserve GPUs for the workers of a run, and wait until enough of them are free.

    GPUs without processes of other programs are preferred. If the user has selected GPUs by ``CUDA_VISIBLE_DEVICES``,
    the run does not wait, but shares them with other runs. Nor does it wait for a run whose end waits for this one,
    because a callback of that run has started it.

    Args:
        reservation: the reservation of the run.
        spec: the group of workers to start.
        gpus: the ids of the GPUs from which to choose.
        count: the number of GPUs that the run needs.
        wait: True to wait for GPUs; False to raise an error.
        may_shrink: True if the run can do with fewer GPUs than requested.

    Returns:
        The ids of the reserved GPUs, in the order in which they were passed.

    Raises:
        ResourceError: too few GPUs are free, and ``wait`` is False.
        RoomTakenError: too few GPUs are free, and ``may_shrink`` is True.
        BaseException: the end of the run was requested during the wait.
    """

    def notify(line: str) -> None:
        spec.output.console.print(f"{reservation.run}: {line}", error=True)

    foreign = other_processes(gpus)
    candidates = sorted(gpus, key=lambda gpu: gpu in foreign)
    shared = 0 < spec.scaling.num_gpus_per_worker < 1
    if not reservation.take(candidates, count, shared=shared):
        held_by = "; ".join(str(holder) for holder in gpu_holders(without=[reservation]) if holder.gpu in gpus)
        if may_shrink:
            raise RoomTakenError
        if gpus_are_selected():
            reservation.use_anyway(candidates, count)
            notify(f"CUDA_VISIBLE_DEVICES selects GPUs that another run uses. {held_by}")
        elif _waits_for_itself(reservation, gpus, count):
            reservation.use_anyway(candidates, count)
            notify(f"this run shares GPUs with another run of the same thread. {held_by}")
        elif not wait:
            raise _too_few(gpus, count, held_by)
        else:
            notify(f"waiting for {count} of {len(gpus)} GPUs. {held_by}. Press Ctrl-C to stop waiting")
            while not reservation.take(candidates, count, shared=shared):
                _pause(spec.interrupts)
    chosen = [gpu for gpu in gpus if gpu in reservation.gpus]
    if used := [f"GPU {gpu}: {foreign[gpu]}" for gpu in chosen if gpu in foreign]:
        notify(f"other programs use GPUs of this run. {'; '.join(used)}")
    return chosen


def _waits_for_itself(reservation: Reservation, gpus: Sequence[str], count: int) -> bool:
    """Return True if a run needs GPUs that runs hold which cannot end before it."""
    others = [each for each in _of_this_process if each.thread == threading.get_ident() and each is not reservation]
    outer = {gpu for each in others for gpu in each.gpus if gpu in gpus}
    return bool(outer) and count > len(gpus) - len(outer)


def require_free(gpus: Sequence[str], count: int) -> None:
    """Check, before a run is started, that enough GPUs are free.

    Raises:
        ResourceError: other runs use some of the GPUs, so that fewer than ``count`` are free.
    """
    holders = [holder for holder in gpu_holders() if holder.gpu in gpus]
    if count > len(gpus) - len({holder.gpu for holder in holders}):
        raise _too_few(gpus, count, "; ".join(map(str, holders)))


def _too_few(gpus: Sequence[str], count: int, held_by: str) -> ResourceError:
    return ResourceError(
        f"[DT-312] {count} GPUs: expected as many free GPUs of this machine, which has {len(gpus)}, but other runs use "
        f"some. {held_by}. Wait for a run to end, or share its GPUs: set CUDA_VISIBLE_DEVICES"
    )


def _pause(interrupts: Interrupts) -> None:
    requested = select.poll()
    requested.register(interrupts.fileno(), select.POLLIN)
    until = time.monotonic() + _CHECK_S
    while (remaining := until - time.monotonic()) > 0:
        if requested.poll(1000 * remaining):
            interrupts.act()
        if interrupts.error is not None:
            raise interrupts.error


def gpu_holders(*, without: Collection[Reservation] = ()) -> list[GpuHolder]:
    """Return the runs of this user that use GPUs of this machine or, within a batch job, those of the job.

    Args:
        without: reservations to leave out.
    """
    left_out = [reservation._token for reservation in without]
    found: list[GpuHolder] = []
    try:
        directory = _directory() if reserves_gpus() else None
    except StorageError:  # no run could have reserved a GPU there either
        directory = None
    if directory is None:
        return found
    for path, facts in _read_all(directory):
        if not _may_run(facts, path):
            with contextlib.suppress(OSError):
                os.unlink(path)  # left by a killed driver
        elif facts.get("scope") == _scope(os.environ) and path.split(".")[-2] not in left_out:
            names = [facts.get(name) for name in ("gpu", "run", "since")]
            found.append(GpuHolder(str(names[0]), str(names[1]), facts["pid"], str(names[2])))
    return sorted(found, key=lambda holder: (len(holder.gpu), holder.gpu, holder.since, holder.run))


def _may_run(facts: dict[str, Any], path: str) -> bool:
    """Return True if the driver that described itself in a file is running, or may be."""
    if is_on_this_machine(facts):
        return is_running(facts)
    if boot_id(facts) != boot_id(own_facts()):
        return False
    lock = os.path.join(os.path.dirname(path), os.path.basename(path).rsplit(".", 2)[0] + _LOCK)
    with contextlib.suppress(OSError), open(lock, "rb") as file:  # of a driver in another container
        return not try_lock(file.fileno(), fcntl.LOCK_EX)
    return False


def reserves_gpus() -> bool:
    """Return False if the user has switched reservations off."""
    return os.environ.get(_VARIABLE) != _OFF


def _directory() -> str:
    """Return the directory of the reservations.

    Raises:
        StorageError: there is no directory to which no other user can write.
    """
    chosen = os.environ.get(_VARIABLE)
    try:
        return private_directory(chosen) if chosen else machine_directory("gpus")
    except OSError as error:
        raise StorageError(f"{chosen or 'the temporary directory'}: {error.strerror}") from error


def _read_all(directory: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(_FACTS):
                with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                    if facts := parse(file.read(1 << 16), entry.path):
                        yield entry.path, facts


def _scope(environment: Mapping[str, str]) -> str:
    """Return the batch job in which this process runs; empty if there is none."""
    return next((f"{name}={environment[name]}" for name in _BATCH_JOBS if environment.get(name)), "")


def _file_name(gpu: str) -> str:
    return quote(f"{_scope(os.environ)}-{gpu}".lstrip("-"), safe="").replace(".", "%2E")
