"""Makes the mistakes of one page, and prints the messages of each as JSON.

Usage: ``python -m tests.docs.mistakes PAGE``.
"""

import importlib
import json
import os
import sys
from pathlib import Path

from tests.docs.mistakes import making


def main() -> None:
    importlib.import_module(f"tests.docs.mistakes.{sys.argv[1]}")
    shown = {}
    for number, (mistake, function) in enumerate(making.mistakes.items()):
        # A process for each: plugins are imported and replaced.
        file = Path(f"{number}.json").absolute()
        child = os.fork()
        if child == 0:
            file.write_text(json.dumps(making.messages_of(function)))
            os._exit(0)
        os.waitpid(child, 0)
        shown[mistake] = json.loads(file.read_text())
    print(json.dumps(shown))


main()
