"""Steps in TensorFlow, with a process for each worker and ``TF_CONFIG`` set by hand."""

import json
import os
import socket
import subprocess
import sys

from stamps import options

if __name__ == "__main__":
    config = options(steps=800)
    if "TF_CONFIG" not in os.environ:
        sockets = [socket.socket() for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        cluster = {"worker": [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]}
        for one in sockets:
            one.close()
        tasks = [{"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(2)]
        workers = [
            subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "TF_CONFIG": json.dumps(task)})
            for task in tasks
        ]
        sys.exit(max(worker.wait() for worker in workers))

    import tensorflow as tf

    # The number that drivetrain gives its workers.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from tensorflowed import train

    train(config, lambda metrics: None)
    os._exit(0)  # like drivetrain's workers: at an ordinary exit each server waits for the others
