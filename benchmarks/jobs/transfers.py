"""One S3 client that uploads and downloads directories: drivetrain, another library, or a command with its start.

A library first connects and puts a small object. Downloaded files are compared with the uploaded ones.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from saving import clear, seconds, warm
from stamps import options, stamp

Transfer = Callable[[Path, str], object]


def drivetrain(config, *, checked: bool = True) -> tuple[Transfer, Transfer]:
    from drivetrain._storage.directory import Storage
    from drivetrain._storage.remote import locate
    from drivetrain._storage.upload import put_directory

    storage = Storage(*locate(config["uri"], what="storage"))
    storage.write_bytes("small", b"")
    stored = {}

    def upload(source: Path, prefix: str) -> None:
        stored[prefix] = put_directory(storage, str(source), prefix)

    def download(target: Path, prefix: str) -> None:
        storage.get_directory(prefix, str(target), files=stored[prefix] if checked else None)

    return upload, download


def drivetrain_unchecked(config) -> tuple[Transfer, Transfer]:
    return drivetrain(config, checked=False)


def boto3(config) -> tuple[Transfer, Transfer]:
    from boto3 import client as make_client
    from s3transfer.manager import TransferManager

    client = make_client("s3", endpoint_url=config["endpoint"])
    client.put_object(Bucket="bucket", Key="small", Body=b"")

    def upload(source: Path, prefix: str) -> None:
        with TransferManager(client) as manager:
            wait([manager.upload(str(path), "bucket", f"{prefix}/{path.name}") for path in source.iterdir()])

    def download(target: Path, prefix: str) -> None:
        target.mkdir()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=f"{prefix}/")
        keys = [found["Key"] for page in pages for found in page["Contents"]]
        with TransferManager(client) as manager:
            wait([manager.download("bucket", key, str(target / Path(key).name)) for key in keys])

    def wait(futures) -> None:
        for future in futures:
            future.result()

    return upload, download


def aws(config) -> tuple[Transfer, Transfer]:
    command = [config["program"], "--endpoint-url", config["endpoint"], "s3", "cp", "--recursive", "--only-show-errors"]
    return (
        lambda source, prefix: subprocess.run([*command, source, f"s3://bucket/{prefix}"], check=True),
        lambda target, prefix: subprocess.run([*command, f"s3://bucket/{prefix}", target], check=True),
    )


def s5cmd(config) -> tuple[Transfer, Transfer]:
    command = [config["program"], "--log", "error", "--endpoint-url", config["endpoint"], "cp"]
    return (
        lambda source, prefix: subprocess.run([*command, f"{source}/", f"s3://bucket/{prefix}/"], check=True),
        lambda target, prefix: subprocess.run([*command, f"s3://bucket/{prefix}/*", f"{target}/"], check=True),
    )


def rclone(config) -> tuple[Transfer, Transfer]:
    command = [config["program"], "copy", "--quiet", "--s3-no-check-bucket"]
    bucket = f":s3,provider=Other,env_auth=true,endpoint='{config['endpoint']}':bucket"
    return (
        lambda source, prefix: subprocess.run([*command, source, f"{bucket}/{prefix}"], check=True),
        lambda target, prefix: subprocess.run([*command, f"{bucket}/{prefix}", target], check=True),
    )


if __name__ == "__main__":
    config = options(client="", program="", data="", work="", served="", uri="", endpoint="")
    upload, download = globals()[config["client"]](config)
    for source in sorted(Path(config["data"]).iterdir()):
        name = f"{config['client']}-{os.getpid()}-{source.name.replace(' ', '-').replace(',', '')}"
        stored, target = Path(config["served"]) / "bucket" / name, Path(config["work"]) / name
        warm(source)
        stamp(config, "measured", case=f"{source.name}, upload", value=seconds(upload, source, name))
        stamp(config, "measured", case=f"{source.name}, download", value=seconds(download, target, name))
        subprocess.run(["diff", "-rq", source, target], check=True)
        clear(stored, target)
