from drivetrain import ScalingConfig
from drivetrain_gbdt.xgboost import XGBoostTrainer
from sklearn.datasets import load_breast_cancer

frame = load_breast_cancer(as_frame=True).frame
train, valid = frame[:400], frame[400:]
params = {"objective": "binary:logistic", "eval_metric": "logloss"}
trainer = XGBoostTrainer(
    params=params,
    label_column="target",
    num_boost_round=20,
    datasets={"train": train, "valid": valid},
    scaling_config=ScalingConfig(num_workers=8),
)
result = trainer.fit()
print(result.metrics, result.checkpoint)
