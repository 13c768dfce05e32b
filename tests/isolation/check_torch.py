"""`drivetrain[torch]` in an empty environment: its import does not load torch, two workers exchange a tensor."""

import tempfile

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules


def check_config_does_not_import_torch() -> None:
    assert "torch" not in loaded_modules("import drivetrain_torch; drivetrain_torch.TorchConfig()")


def train_func() -> None:
    import torch
    import torch.distributed

    import drivetrain

    ranks_from_one = torch.tensor([torch.distributed.get_rank() + 1.0])
    torch.distributed.all_reduce(ranks_from_one)
    drivetrain.report({"sum": ranks_from_one.item()})


def check_two_workers_allreduce(storage_path: str) -> None:
    from drivetrain import RunConfig, ScalingConfig
    from drivetrain_torch import TorchTrainer

    result = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="isolation", storage_path=storage_path),
    ).fit()
    assert result.error is None, result.error
    assert result.metrics["sum"] == 3.0, result.metrics


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    check_config_does_not_import_torch()
    with tempfile.TemporaryDirectory() as directory:
        check_two_workers_allreduce(directory)
    print("ok: drivetrain[torch]")
