"""A backend whose module imports its framework. The framework of this test is a module of the standard library."""

import wave
from dataclasses import dataclass

from drivetrain.plugin import Backend, BackendConfig
from tests.kits.sound_backend import SoundBackend

FRAMEWORK = wave.__name__


@dataclass(frozen=True, kw_only=True)
class EagerConfig(BackendConfig):
    def create(self) -> Backend:
        return SoundBackend()
