"""What TensorBoard shows of event files."""

import sys
import types
from pathlib import Path
from typing import Any


def read_events(directory: Path) -> Any:
    """TensorBoard's own reading of the event files in a directory, nothing being left out."""
    # The module by which TensorBoard knows that it is to do without TensorFlow, which takes seconds to import.
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0, "histograms": 0}).Reload()
