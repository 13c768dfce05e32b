from drivetrain_torch.testing import StrategyConformance


class TestFP16Strategy(StrategyConformance):
    name = "fp16"
    options = {"bucket_cap_mb": 1}
    tolerance = 1e-2  # of 16-bit numbers
