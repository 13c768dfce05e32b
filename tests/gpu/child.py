"""Runs one check: ``python -m tests.gpu.child MODULE FUNCTION --device D --gpus N --directory DIR``.

It writes the result to ``result.json`` in the directory, and prints the output of the check and its traceback.
"""

import argparse
import faulthandler
import importlib
import json
import os
import resource
import traceback
from pathlib import Path
from typing import Any

from tests.gpu.check import Check, Run, Skip


def main() -> None:
    faulthandler.enable()  # for the signal sent when the time limit is reached
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("function")
    parser.add_argument("--device", required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    options = parser.parse_args()
    check: Check = getattr(importlib.import_module(options.module), options.function)
    result = run(check, Run(device=options.device, gpus=options.gpus, directory=options.directory))
    draft = options.directory / "result.json.part"
    draft.write_text(json.dumps(result))
    os.replace(draft, options.directory / "result.json")


def run(check: Check, argument: Run) -> dict[str, Any]:
    try:
        return {"result": "passed", "figures": check.function(argument) or {}}
    except Skip as skip:
        return {"result": "skipped", "reason": str(skip)}
    except Exception as error:
        traceback.print_exc()
        return {"result": "failed", "reason": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
