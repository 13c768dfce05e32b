"""`drivetrain[data]` in an empty environment: two processes each read their part of a file."""

import tempfile
from pathlib import Path

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules

ROWS = 101


def check_provider_does_not_import_a_library() -> None:
    datasets = "{'train': 'rows.csv', 'other': object()}"
    statement = f"from drivetrain.plugin.datasets import required_runtime; required_runtime({datasets})"
    loaded = loaded_modules(statement)
    assert "drivetrain_data" in loaded
    assert not loaded & {"numpy", "pyarrow", "pandas", "ray"}, loaded


def train_func() -> None:
    import drivetrain

    batches = drivetrain.get_dataset_shard("train").iter_batches(batch_size=10)
    rows = [row for batch in batches for row in batch["id"].tolist()]
    drivetrain.report({"rows": len(rows), "sum": sum(rows)}, reduce={"rows": "sum", "sum": "sum"})


def check_two_workers_read_a_file(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

    file = Path(storage_path, "rows.csv")
    file.write_text("\n".join(["id", *map(str, range(ROWS))]) + "\n")
    result = DataParallelTrainer(
        train_func,
        datasets={"train": file},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage_path, verbose=0),
    ).fit()
    assert (result.metrics["rows"], result.metrics["sum"]) == (ROWS, sum(range(ROWS))), result.metrics


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    check_provider_does_not_import_a_library()
    with tempfile.TemporaryDirectory() as directory:
        check_two_workers_read_a_file(directory)
    print("ok: drivetrain[data]")
