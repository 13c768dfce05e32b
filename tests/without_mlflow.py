"""Hides MLflow in the fork server that imports DeepSpeed, which would import MLflow, and polars with it.

The threads of polars would prevent that the server forks, and every worker would import DeepSpeed, for seconds.
"""

import sys

sys.modules["mlflow"] = None
