"""The floor on Ray: an actor is killed while another is in an endless loop, and the driver waits for both."""

import ray
from failing import LOST_RANK, fail
from stamps import options, stamp


@ray.remote(num_cpus=1)
class Worker:
    def run(self, config, rank):
        fail(config, rank, 2)


if __name__ == "__main__":
    config = options(how="kill")
    ray.init(num_cpus=2, include_dashboard=False)
    workers = [Worker.remote() for _ in range(2)]
    runs = [worker.run.remote(config, rank) for rank, worker in enumerate(workers)]
    try:
        ray.get(runs[LOST_RANK])
    except ray.exceptions.ActorDiedError:
        stamp(config, "noticed")
    for worker in workers:
        ray.kill(worker)
