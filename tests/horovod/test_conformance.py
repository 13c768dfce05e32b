"""The conformance kit applied to the Horovod backend."""

from drivetrain.testing import BackendConformance
from drivetrain_horovod import HorovodConfig


def all_sum(value: float) -> float:
    import horovod.torch as hvd
    import torch

    hvd.init()
    return float(hvd.allreduce(torch.tensor(value), op=hvd.Sum))


class TestHorovod(BackendConformance):
    config = HorovodConfig(timeout_s=30)
    framework = "horovod"
    all_sum = staticmethod(all_sum)


class TestElasticHorovod(BackendConformance):
    config = HorovodConfig(elastic=True, timeout_s=30)
    framework = "horovod"
    all_sum = staticmethod(all_sum)
