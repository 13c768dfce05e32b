"""The conformance kit of frameworks, applied to JAX, which has no global random generator."""

from collections.abc import Sequence
from typing import Any

import jax

from drivetrain_testing import FrameworkConformance


class TestFramework(FrameworkConformance):
    name = "jax"

    @staticmethod
    def make_objects_of_process() -> Sequence[Any]:
        mesh = jax.make_mesh((1,), ("data",))
        return [jax.devices()[0], mesh, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())]
