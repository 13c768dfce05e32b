"""XGBoost on a GPU."""

from typing import Any

from tests.gpu.check import Figures, Run, Skip, check


@check(packages=("xgboost", "pyarrow", "numpy"))
def xgboost(run: Run) -> Figures:
    """XGBoostTrainer with device="cuda" reaches the same metric as on the CPU"""
    import numpy
    import pyarrow
    import xgboost

    from drivetrain import ScalingConfig
    from drivetrain_gbdt.xgboost import XGBoostTrainer

    if run.device == "cuda" and not xgboost.build_info()["USE_CUDA"]:
        raise Skip(f"the installed XGBoost {xgboost.__version__} is built without CUDA")
    generator = numpy.random.default_rng(0)
    features = generator.normal(size=(20_000, 8)).astype(numpy.float32)
    labels = (features[:, 0] * features[:, 1] + features[:, 2] > 0).astype(numpy.float32)
    columns = {f"x{column}": features[:, column] for column in range(8)}
    table = pyarrow.table({**columns, "label": labels})

    def train(device: str, scaling: ScalingConfig) -> Any:
        return XGBoostTrainer(
            params={"objective": "binary:logistic", "eval_metric": "logloss", "max_depth": 5, "device": device},
            label_column="label",
            num_boost_round=30,
            datasets={"train": table.slice(0, 16_000), "valid": table.slice(16_000)},
            scaling_config=scaling,
            run_config=run.run_config(),
        ).fit()

    got = train(run.device, run.scaling(run.workers())).metrics["valid-logloss"]
    on_cpu = ScalingConfig(num_workers=run.workers(), runtime="local")
    expected = train("cpu", on_cpu).metrics["valid-logloss"]
    assert abs(got - expected) < 0.05, f"valid-logloss: expected {expected} within 0.05, got {got}"
    assert got < 0.2, f"valid-logloss: expected less than 0.2, got {got}"
    return {"valid-logloss": got, "on the CPU": expected, "workers": run.workers()}
