"""The main function of a worker process. Its arguments, which contain a secret, arrive on standard input."""

import json
import os
import signal
import threading

from drivetrain.plugin.runtimes import DriverAddress, worker_main


def main() -> None:
    """Run a worker. The standard input stays open as long as the driver runs."""
    driver = open(os.dup(0), "rb", buffering=0)  # noqa: SIM115 - it is open until this process exits
    with open(os.devnull, "rb") as nothing:  # the train function must not read from the driver
        os.dup2(nothing.fileno(), 0)
    host, port, token, index, preload = json.loads(driver.readline())

    def exit_with_driver() -> None:
        driver.read(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=exit_with_driver, name="driver", daemon=True).start()
    worker_main(DriverAddress(host, port, bytes.fromhex(token)), index, preload=preload)


if __name__ == "__main__":
    main()
