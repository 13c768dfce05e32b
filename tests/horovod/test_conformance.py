"""The conformance kit, on Horovod."""

from drivetrain.testing import BackendConformance
from drivetrain_horovod import HorovodConfig


class TestHorovod(BackendConformance):
    config = HorovodConfig(timeout_s=30)
    runtimes = ("local",)

    @staticmethod
    def all_sum(value: float) -> float:
        import horovod.torch as hvd
        import torch

        hvd.init()
        return float(hvd.allreduce(torch.tensor(value), op=hvd.Sum))
