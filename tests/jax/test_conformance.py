from drivetrain.testing import BackendConformance
from drivetrain_jax import JaxConfig


def all_sum(value: float) -> float:
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    return float(multihost_utils.process_allgather(jnp.float32(value)).sum())


class TestJaxBackend(BackendConformance):
    config = JaxConfig()
    all_sum = staticmethod(all_sum)
