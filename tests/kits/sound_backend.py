"""A backend without mistakes, from which the broken ones derive."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drivetrain import TrainContext
from drivetrain.plugin import Backend, BackendConfig
from drivetrain.plugin.backends import WorkerGroup


class SoundBackend(Backend):
    name = "sound"

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        return [{"rank": str(worker.rank)} for worker in group.workers]

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        yield


@dataclass(frozen=True, kw_only=True)
class ConfigOf(BackendConfig):
    """The configuration of a backend without settings."""

    kind: type[Backend]

    def create(self) -> Backend:
        return self.kind()
