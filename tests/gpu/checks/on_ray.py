"""GPUs that Ray assigns."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from drivetrain_torch import TorchConfig
from tests.gpu.check import Figures, Run, check, equal
from tests.gpu.checks.process_group import expect_collectives, train_on_shared_gpu, use_collectives


@contextlib.contextmanager
def local_ray(run: Run) -> Iterator[None]:
    import ray

    gpus = run.gpus if run.device == "cuda" else 0
    # A short path, because the length of socket paths is limited.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # Ray's future default; without it, Ray warns
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=gpus,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=directory,
        )
        try:
            yield
        finally:
            ray.shutdown()


@check(packages=("ray",))
def one_gpu(run: Run) -> Figures:
    """A Ray worker trains on the GPU that Ray assigns to it"""
    with local_ray(run):
        got = run.fit(use_collectives, runtime="ray").return_value
    expect_collectives(got, run, 1, run.collectives)
    return {"device": got["device"]}


@check(packages=("ray",))
def half_a_gpu(run: Run) -> Figures:
    """Two Ray workers with half a GPU each train one model over Gloo"""
    config = TorchConfig(backend="gloo")
    options = {"workers": 2, "gpus_per_worker": 0.5, "runtime": "ray", "torch_config": config}
    with local_ray(run):
        got = run.fit(train_on_shared_gpu, **options).return_value
    equal("devices", got["devices"], ["cuda:0" if run.device == "cuda" else "cpu"] * 2)
    equal("weights of both ranks are identical", got["identical"], True)
    return {"devices": ", ".join(got["devices"])}
