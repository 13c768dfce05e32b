"""LightGBM on a table, with a custom script: a list of machines, and a process for each worker."""

import multiprocessing
import socket

import lightgbm
import numpy as np
import pyarrow.parquet
from gbdt import LIGHTGBM, ROUNDS, LightGBMEnd, LightGBMStamps, MemoryMeter
from stamps import options, stamp


def work(config, rank, ports, go):
    go.wait()
    file = pyarrow.parquet.ParquetFile(config["data"])
    groups = range(file.num_row_groups)[rank :: config["workers"]]
    table = file.read_row_groups(list(groups))
    features = [name for name in table.column_names if name != "label"]
    matrix = np.empty((table.num_rows, len(features)), dtype=np.float32)
    for number, name in enumerate(features):
        matrix[:, number] = table.column(name).to_numpy()
    data = lightgbm.Dataset(matrix, label=table.column("label").to_numpy())
    network = {}
    if len(ports) > 1:
        machines = ",".join(f"127.0.0.1:{port}" for port in ports)
        network = {"tree_learner": "data", "num_machines": len(ports), "machines": machines, "pre_partition": True}
        network["local_listen_port"] = ports[rank]
    callbacks = [LightGBMStamps(config), LightGBMEnd(config)]
    model = lightgbm.train({**LIGHTGBM, **network}, data, ROUNDS, valid_sets=[data], callbacks=callbacks)
    if rank == 0:
        model.save_model(f"{config['storage']}.txt")


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    config = options(data="", workers=1, shard_bytes=1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightgbm"])
    go = context.Event()
    ports = free_ports(config["workers"])
    workers = [context.Process(target=work, args=(config, rank, ports, go)) for rank in range(config["workers"])]
    for worker in workers:
        worker.start()
    stamp(config, "started")
    scales = MemoryMeter([worker.pid for worker in workers])
    go.set()
    for worker in workers:
        worker.join()
    stamp(config, "weighed", shards=scales.grown() / config["shard_bytes"])
