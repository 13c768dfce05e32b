"""Programs that use XGBoost and LightGBM."""

from __future__ import annotations

from tests.ports.port import PYTHON, Edit, Port

_SCALING = "scaling_config=ScalingConfig(num_workers=1)"
_RETRIED = (
    "scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(failure_config=FailureConfig(max_failures=1),"
    " checkpoint_config=CheckpointConfig(checkpoint_frequency=1))"
)

LIGHTGBM = Port(
    name="lightgbm",
    repository="microsoft/LightGBM",
    script="examples/python-guide/simple_example.py",
    data_files=("examples/regression/*",),
    launcher=PYTHON,
    workers=0,
    prepare=(
        Edit(
            "import lightgbm as lgb\n",
            "import lightgbm as lgb\n"
            "import probe\n\n\n"
            "def record(env):\n"
            "    valid = [value for name, _, value, _ in env.evaluation_result_list if name != 'train']\n"
            "    probe.step(env.iteration, sum(valid))\n\n",
        ),
        Edit("callbacks=[lgb.early_stopping", "callbacks=[record, lgb.early_stopping"),
        Edit('"verbose": 0', '"verbose": -1, "num_threads": 1, "deterministic": True'),
    ),
    changes=(
        Edit(
            "import lightgbm as lgb\n",
            "import lightgbm as lgb\n"
            "from drivetrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig\n"
            "from drivetrain_gbdt.lightgbm import LightGBMTrainer\n",
        ),
        Edit(
            "\ny_train = df_train[0]\n",
            "df_train.columns = [f'c{name}' for name in df_train]\ndf_test.columns = df_train.columns\n\n",
        ),
        Edit(
            "y_test = df_test[0]\nX_train = df_train.drop(0, axis=1)\nX_test = df_test.drop(0, axis=1)\n",
            "y_test = df_test['c0']\nX_test = df_test.drop('c0', axis=1)\n",
        ),
        Edit(
            "lgb_train = lgb.Dataset(X_train, y_train)\nlgb_eval = lgb.Dataset(X_test, y_test, reference=lgb_train)\n",
            "",
        ),
        Edit(
            "gbm = lgb.train(\n    params, lgb_train, num_boost_round=20, valid_sets=lgb_eval,",
            "trainer = LightGBMTrainer(\n"
            "    params=params, label_column='c0', datasets={'train': df_train, 'valid': df_test},\n"
            f"    {_SCALING}, num_boost_round=20,",
        ),
        Edit(
            "stopping_rounds=5)]\n)\n",
            "stopping_rounds=5)]\n)\ngbm = LightGBMTrainer.get_model(trainer.fit().checkpoint)\n",
        ),
    ),
    resume_changes=(Edit(_SCALING, _RETRIED),),
    kill="1:12",
)

XGBOOST = Port(
    name="xgboost",
    repository="dmlc/xgboost",
    script="demo/guide-python/basic_walkthrough.py",
    data_files=("demo/data/*",),
    launcher=PYTHON,
    workers=0,
    prepare=(
        Edit(
            "import xgboost as xgb\n",
            "import xgboost as xgb\n"
            "import pandas as pd\n"
            "import probe\n\n\n"
            "class Probe(xgb.callback.TrainingCallback):\n"
            "    def after_iteration(self, model, epoch, evals_log):\n"
            "        probe.step(epoch, evals_log['eval']['logloss'][-1])\n\n",
        ),
        Edit("num_round = 2\n", "num_round = 10\n"),
        Edit("dtrain = xgb.DMatrix(X, y)", "X = X.toarray()\ndtrain = xgb.DMatrix(X, y)"),
        Edit("dtest = xgb.DMatrix(X_test, y_test)", "X_test = X_test.toarray()\ndtest = xgb.DMatrix(X_test, y_test)"),
        Edit("evals=watchlist)", "evals=watchlist, callbacks=[Probe()])"),
    ),
    changes=(
        Edit(
            "import pandas as pd\n",
            "import pandas as pd\n"
            "from drivetrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig\n"
            "from drivetrain_gbdt.xgboost import XGBoostTrainer\n",
        ),
        Edit("dtrain = xgb.DMatrix(X, y)\n", "train = pd.DataFrame(X).add_prefix('f').assign(y=y)\n"),
        Edit(
            "dtest = xgb.DMatrix(X_test, y_test)\n",
            "test = pd.DataFrame(X_test).add_prefix('f').assign(y=y_test)\n"
            "dtest = xgb.DMatrix(test.drop(columns='y'), y_test)\n",
        ),
        Edit('watchlist = [(dtest, "eval"), (dtrain, "train")]\n', ""),
        Edit(
            "bst = xgb.train(param, dtrain, num_boost_round=num_round, evals=watchlist, callbacks=[Probe()])\n",
            "trainer = XGBoostTrainer(params=param, label_column='y', num_boost_round=num_round, callbacks=[Probe()],\n"
            "                         datasets={'train': train, 'eval': test},\n"
            f"                         {_SCALING})\n"
            "bst = XGBoostTrainer.get_model(trainer.fit().checkpoint)\n",
        ),
    ),
    resume_changes=(Edit(_SCALING, _RETRIED),),
    kill="1:6",
)

PORTS = (LIGHTGBM, XGBOOST)
