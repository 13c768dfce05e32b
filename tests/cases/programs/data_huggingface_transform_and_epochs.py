"""A Hugging Face dataset keeps its transform, and each epoch of a shuffled stream has the order of `set_epoch`."""

# arguments: local
# campaign: ray; command

import json
import sys
import tempfile
from pathlib import Path

import datasets

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig


def read(config):
    batches = drivetrain.get_dataset_shard("train").iter_batches(batch_size=4)
    epochs = [[int(x) for batch in batches for x in next(iter(batch.values()))] for _ in range(2)]
    Path(config["output"], str(drivetrain.get_context().get_world_rank())).write_text(json.dumps(epochs))


def epochs_of_workers(dataset):
    with tempfile.TemporaryDirectory() as output:
        DataParallelTrainer(
            read,
            train_loop_config={"output": output},
            datasets={"train": dataset},
            scaling_config=ScalingConfig(num_workers=2, runtime=sys.argv[1]),
            run_config=RunConfig(verbose=0),
        ).fit()
        return [json.loads(file.read_text()) for file in sorted(Path(output).iterdir())]


def epoch_alone(stream, epoch):
    stream.set_epoch(epoch)
    return [row["x"] for row in stream]


if __name__ == "__main__":
    rows = datasets.Dataset.from_dict({"x": list(range(20))})
    twice = epochs_of_workers(rows.with_transform(lambda batch: {"twice": [2 * x for x in batch["x"]]}))
    print(twice)
    right = twice == [[list(range(0, 20, 2))] * 2, [list(range(20, 40, 2))] * 2]

    stream = rows.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=10)
    (first, second), (third, fourth) = epochs_of_workers(stream)
    print(first, second, third, fourth)
    for epoch, read_rows in enumerate((first + third, second + fourth)):
        alone = epoch_alone(stream, epoch)
        right &= sorted(read_rows) == sorted(alone) == list(range(20))
    right &= first != second and third != fourth
    sys.exit(0 if right else 1)
