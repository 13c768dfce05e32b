"""Names for the command ``drivetrain warm``, and for programs that start scripts at once."""

from drivetrain._base.lazy import publish
from drivetrain._runtimes.warm import KEEP_WARM, WarmServer, run_in_warm_server, seconds_of, warm_servers

__all__ = ["KEEP_WARM", "WarmServer", "run_in_warm_server", "seconds_of", "warm_servers"]

publish(__name__)
