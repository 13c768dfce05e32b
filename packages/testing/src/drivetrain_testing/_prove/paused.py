"""The process of a driver that starts ahead of time: it imports what its script imports, and waits.

It executes the script as ``python script.py`` would, but stops after the imports at the head of the script until it is
needed. Nothing that comes later is executed early. So a script that sets environment variables before its imports also
does so here.
"""

from __future__ import annotations
import __future__

import ast
import json
import os
import socket
import sys
from pathlib import Path
from types import CodeType

__all__ = ["main"]

_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def main() -> None:
    """Execute the head of the script ``sys.argv[2]``, wait for a message on the descriptor ``sys.argv[1]``, continue.

    The message is a JSON object with the environment variables to set. Without a message, the process exits.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    del sys.argv[:2]
    script = sys.argv[0]
    namespace = vars(sys.modules["__main__"])
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]  # the statement that called this function has imported it
    namespace["__file__"] = script
    sys.path[0] = str(Path(script).resolve().parent)
    head, rest = _split(Path(script).read_bytes(), script)
    exec(head, namespace)
    with control, control.makefile("rb") as stream:
        message = stream.readline()
    if not message:
        os._exit(0)  # the program that would have needed this driver has ended
    os.environ.update(json.loads(message))
    exec(rest, namespace)


def _split(source: bytes, script: str) -> tuple[CodeType, CodeType]:
    """Compile the docstring and the imports at the head of a script, and everything after them."""
    tree = ast.parse(source, script)
    size = next((at for at, statement in enumerate(tree.body) if not _is_head(at, statement)), len(tree.body))
    head = compile(ast.Module(tree.body[:size], tree.type_ignores), script, "exec", dont_inherit=True)
    flags = head.co_flags & _FUTURES
    rest = ast.Module(tree.body[size:], tree.type_ignores)
    return head, compile(rest, script, "exec", flags=flags, dont_inherit=True)


def _is_head(at: int, statement: ast.stmt) -> bool:
    is_docstring = at == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_docstring or isinstance(statement, (ast.Import, ast.ImportFrom))
