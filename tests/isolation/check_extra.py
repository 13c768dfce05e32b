"""An extra without a check of its own, in an empty environment: a name that it provides exists, and a run finishes."""

import importlib
import sys
import tempfile

from check_core import check_dependencies_are_complete, check_import_is_light, check_two_workers_report

if __name__ == "__main__":
    _, place = sys.argv
    module, _, name = place.partition(":")
    check_dependencies_are_complete()
    check_import_is_light()
    assert callable(getattr(importlib.import_module(module), name)), place
    with tempfile.TemporaryDirectory() as directory:
        check_two_workers_report(directory)
    print(f"ok: {place}")
