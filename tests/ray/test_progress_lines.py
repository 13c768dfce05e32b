"""The lines that Ray's progress bars print for Ray itself are neither shown nor in the logs."""

from pathlib import Path

import pytest

from drivetrain import DataConfig, DataParallelTrainer, RunConfig, ScalingConfig, get_dataset_shard


def train() -> None:
    from ray.experimental import tqdm_ray

    print("first", flush=True)
    for _ in tqdm_ray.tqdm(range(3)):
        print("step")
    for _ in get_dataset_shard("whole").iter_batches():  # the worker itself executes the dataset
        print("batch")


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")  # Ray Data triggers these warnings itself
@pytest.mark.usefixtures("ray_address")
def test_progress_lines_of_ray_are_not_part_of_the_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import ray.data

    result = DataParallelTrainer(
        train,
        datasets={"whole": ray.data.range(10, override_num_blocks=2).map_batches(lambda batch: batch)},
        dataset_config=DataConfig(datasets_to_split=[]),
        scaling_config=ScalingConfig(num_workers=1, runtime="ray"),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0),
    ).fit()

    log = Path(result.path, "logs", "rank_0.log").read_text()
    shown = capfd.readouterr().out
    for text in (log, shown):
        assert "first" in text
        assert text.count("step") == 3
        assert "batch" in text
        assert "magic_token" not in text
