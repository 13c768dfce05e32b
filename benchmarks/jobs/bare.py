"""An interpreter that does nothing: what a process of Python weighs at least. It imports nothing that is not there."""

import os
import sys

values = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
with open(values["--stamps"], "w") as file:
    file.write(f'{{"name": "held", "time": 0, "pid": {os.getpid()}}}\n')
while not os.path.exists(values["--hold"]):
    os.sched_yield()
