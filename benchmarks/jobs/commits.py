"""Commits of small checkpoints, one after the other in this process, and what they rest on: one durable file each."""

import json
import os
import time
from pathlib import Path

from saving import seconds
from stamps import options, stamp

from drivetrain.checkpoints import MANIFEST, CheckpointManager, checkpoint_name
from drivetrain.storage import Storage, locate, open_storage


def write_durably(directory: Path, data: bytes) -> None:
    """Replaces a file such that it survives a power failure, and no more than that."""
    draft, target = directory / "draft", directory / "file"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(descriptor, data)
    os.fsync(descriptor)
    os.close(descriptor)
    os.replace(draft, target)
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def put_by_boto3(config, data: bytes):
    """One put of the same bytes, by a client that has made its connection."""
    import boto3

    client = boto3.client("s3", endpoint_url=config["endpoint"])
    client.put_object(Bucket="bucket", Key="peer/first", Body=b"")
    return lambda: client.put_object(Bucket="bucket", Key="peer/file", Body=data)


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
    taken = []
    for index in range(1, config["commits"] + 1):
        files = {0: storage.put_directory(str(source), checkpoint_name(index))}
        taken.append(seconds(manager.commit, index=index, iteration=index, files=files, metrics=metrics))
    assert len(json.loads(storage.read_bytes(MANIFEST))["checkpoints"]) == config["commits"]

    small = json.dumps({"checkpoints": [metrics]}).encode()
    if uri:
        put = put_by_boto3(config, small)
        manifest = [seconds(storage.write_bytes, MANIFEST, small) for _ in taken]
        floor = [seconds(put) for _ in taken]
    else:
        manifest, floor = [], [seconds(write_durably, source, small) for _ in taken]
    stamp(config, "committed", commits=taken, manifest=manifest, floor=floor)
