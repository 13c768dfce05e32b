import xgboost
from sklearn.datasets import load_breast_cancer

frame = load_breast_cancer(as_frame=True).frame
train, valid = frame[:400], frame[400:]
params = {"objective": "binary:logistic", "eval_metric": "logloss"}
features = [name for name in frame if name != "target"]
matrices = [xgboost.DMatrix(rows[features], rows["target"]) for rows in (train, valid)]
xgboost.train(
    params,
    matrices[0],
    num_boost_round=20,
    evals=[(matrices[0], "train"), (matrices[1], "valid")],
)
