"""Commits of small checkpoints in this process, in turn with their floor: one file replaced durably."""

import json
import os
import time
from functools import partial
from pathlib import Path

from saving import seconds
from stamps import options, stamp

from drivetrain._storage.directory import Storage, open_storage
from drivetrain._storage.layout import MANIFEST, checkpoint_name
from drivetrain._storage.manifest import CheckpointManager
from drivetrain._storage.remote import locate
from drivetrain._storage.upload import put_directory


def write_durably(directory: Path, data: bytes) -> None:
    """Replace a file so that it survives a power failure, with no further work."""
    draft, target = directory / "draft", directory / "file"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(descriptor, data)
    os.fsync(descriptor)
    os.close(descriptor)
    os.replace(draft, target)
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def put_by_boto3(config):
    """Put one object, with a client that has already connected."""
    import boto3

    client = boto3.client("s3", endpoint_url=config["endpoint"])
    client.put_object(Bucket="bucket", Key="peer/first", Body=b"")
    return lambda data: client.put_object(Bucket="bucket", Key="peer/file", Body=data)


if __name__ == "__main__":
    config = options(uri="", endpoint="", commits=1000)
    source = Path(config["storage"]) / "source"
    source.mkdir(parents=True)
    (source / "model.bin").write_bytes(os.urandom(1000))
    uri = config["uri"].replace("RUN", f"run{os.getpid()}")
    storage = Storage(*locate(uri or Path(config["storage"]) / "run", what="storage"))
    open_storage(storage)
    manager = CheckpointManager(storage)
    metrics = {"loss": 0.5, "accuracy": 0.5, "_timestamp": int(time.time()), "_training_iteration": 1}
    directory = Path(config["storage"]) / "floor"
    directory.mkdir()
    put = put_by_boto3(config) if uri else partial(write_durably, directory)
    taken, manifest, floor = [], [], []
    for index in range(1, config["commits"] + 1):
        files = {0: put_directory(storage, str(source), checkpoint_name(index))}
        taken.append(seconds(manager.commit, number=index, iteration=index, files=files, metrics=metrics))
        data = storage.read_bytes(MANIFEST)
        manifest.append(seconds(storage.write_bytes, MANIFEST, data))
        floor.append(seconds(put, data))
    assert len(json.loads(data)["checkpoints"]) == config["commits"]
    stamp(config, "committed", commits=taken, manifest=manifest, floor=floor)
