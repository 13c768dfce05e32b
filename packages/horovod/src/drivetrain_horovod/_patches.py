"""Patches for the source of Horovod 0.28.1. :mod:`drivetrain_horovod.build` applies them before it compiles Horovod.

Horovod 0.28.1 is the last release. If there is another, remove the patches that it contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["PATCHES", "apply_patches"]

# The headers of PyTorch require C++17.
_CPP_17 = ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)")

# A thread that starts an operation checks that Horovod is not shut down, and then adds a tensor to the queue of a
# process set. Horovod's own thread empties the queues after a shutdown. If this happened in between, nothing would ever
# complete the tensor: hvd.synchronize() would wait for it forever. After the next hvd.init(), the request would be sent
# to the other ranks, and a new tensor with this name would be rejected as a duplicate. With the lock, the check and the
# addition are one step for Horovod's own thread, which takes this lock before it empties the queues.
_CHECK = "  if (horovod_global.shut_down) {\n"
_LOCK_AND_CHECK = (
    "  std::lock_guard<std::recursive_mutex> guard(horovod_global.process_set_table.mutex);\n"
    "  if (horovod_global.shut_down || !horovod_global.initialization_done) {\n"
)
_THEN_FAIL = "    return SHUT_DOWN_ERROR;\n  }\n"

# Horovod resets these variables at the end of a shutdown. In the other order, one of them shows at any time that
# Horovod is not running.
_RESET_SHUT_DOWN = "    horovod_global.shut_down = false;\n"
_RESET_INITIALIZED = "    horovod_global.initialization_done = false;\n"

# To release tensors when it empties a queue, Horovod's own thread needs the GIL, while it holds the lock. A thread that
# starts an operation must therefore not hold the GIL when it takes the lock.
_FIRST_LINE = "  ThrowIfError(common::CheckInitialized());\n"

PATCHES: Mapping[str, Sequence[tuple[str, str]]] = {
    "CMakeLists.txt": [_CPP_17],
    "horovod/torch/CMakeLists.txt": [_CPP_17],
    "horovod/common/operations.cc": [
        (_CHECK + _THEN_FAIL, _LOCK_AND_CHECK + _THEN_FAIL),
        (_RESET_SHUT_DOWN + _RESET_INITIALIZED, _RESET_INITIALIZED + _RESET_SHUT_DOWN),
    ],
    "horovod/torch/mpi_ops_v2.cc": [(_FIRST_LINE, "  py::gil_scoped_release release_python_gil;\n" + _FIRST_LINE)],
}
"""For each file: pairs of a text and what replaces it wherever it occurs."""


def apply_patches(source: Path) -> None:
    """Change the files of Horovod's unpacked release.

    Args:
        source: the directory of the release.

    Raises:
        ValueError: A file does not contain a text that should be replaced.
    """
    for name, replacements in PATCHES.items():
        path = source / name
        text = path.read_text()
        for old, new in replacements:
            if old not in text:
                raise ValueError(f"{path}: expected the text {old!r}, which is not in this file")
            text = text.replace(old, new)
        path.write_text(text)
