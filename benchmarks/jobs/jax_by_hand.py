"""Steps in JAX, with a process for each worker that calls ``jax.distributed.initialize``."""

import os
import socket
import subprocess
import sys

from stamps import options

if __name__ == "__main__":
    config = options(steps=800)
    if "BENCHMARK_RANK" not in os.environ:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{one.getsockname()[1]}"
        variables = {**os.environ, "BENCHMARK_ADDRESS": address, "OMP_NUM_THREADS": "1"}
        workers = [
            subprocess.Popen([sys.executable, *sys.argv], env={**variables, "BENCHMARK_RANK": str(rank)})
            for rank in range(2)
        ]
        sys.exit(max(worker.wait() for worker in workers))

    import jax

    jax.distributed.initialize(os.environ["BENCHMARK_ADDRESS"], 2, int(os.environ["BENCHMARK_RANK"]))
    from jaxed import train

    train(config)
