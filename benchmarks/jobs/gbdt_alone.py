"""XGBoost on a table, with a custom script: a tracker, and a process for each worker."""

import multiprocessing

import pyarrow.parquet
import xgboost
from gbdt import PARAMS, ROUNDS, MemoryMeter, Stamps
from stamps import options, stamp
from xgboost import collective
from xgboost.tracker import RabitTracker


def work(config, rank, tracker, go):
    go.wait()
    file = pyarrow.parquet.ParquetFile(config["data"])
    groups = range(file.num_row_groups)[rank :: config["workers"]]
    table = file.read_row_groups(list(groups))
    with collective.CommunicatorContext(**tracker, dmlc_task_id=f"[{rank:08d}]"):
        matrix = xgboost.QuantileDMatrix(table.drop(["label"]), table.column("label").to_numpy())
        del table
        model = xgboost.train(
            PARAMS, matrix, ROUNDS, evals=[(matrix, "train")], verbose_eval=False, callbacks=[Stamps(config)]
        )
        if rank == 0:
            model.save_model(f"{config['storage']}/model.ubj")


if __name__ == "__main__":
    config = options(data="", workers=1, shard_bytes=1)
    tracker = RabitTracker(n_workers=config["workers"], host_ip="127.0.0.1", sortby="task", timeout=60)
    tracker.start()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["xgboost"])
    go = context.Event()
    workers = [
        context.Process(target=work, args=(config, rank, tracker.worker_args(), go))
        for rank in range(config["workers"])
    ]
    for worker in workers:
        worker.start()
    stamp(config, "started")
    scales = MemoryMeter([worker.pid for worker in workers])
    go.set()
    for worker in workers:
        worker.join()
    stamp(config, "weighed", shards=scales.grown() / config["shard_bytes"])
