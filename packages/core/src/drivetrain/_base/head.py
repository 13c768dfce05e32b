"""The imports at the head of a script: those that precede every other statement."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

from drivetrain._base.interpreter import is_in_site

__all__ = ["HeadImport", "end_of_head", "head_imports", "later_imports"]

_OF_IMPORTS = ("drivetrain._runtimes.early", "drivetrain._base.lazy", "importlib._bootstrap")


class HeadImport(NamedTuple):
    """An import statement at the head of a script.

    Attributes:
        statement: the statement.
        modules: the names of the modules that it imports.
        path: the path of the script.
    """

    statement: ast.stmt
    modules: tuple[str, ...]
    path: str

    def compiled(self) -> CodeType:
        """Return the statement as code, whose errors name the script and its line."""
        return compile(ast.Module([self.statement], []), self.path, "exec", dont_inherit=True)


def later_imports() -> list[HeadImport] | None:
    """Return the imports that the main script will make, if it is executing an import at its head; otherwise None."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None or not path.endswith(".py"):
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _OF_IMPORTS:
        frame = frame.f_back
    if frame is None or frame.f_globals is not vars(main) or frame.f_code.co_name != "<module>":
        return None
    if os.path.abspath(frame.f_code.co_filename) != os.path.abspath(path):  # code that the script executes
        return None
    try:
        with open(path, "rb") as file:
            head = head_imports(file.read(), path)
    except OSError:
        return None
    line = frame.f_lineno
    if not any(each.statement.lineno <= line <= (each.statement.end_lineno or line) for each in head):
        return None
    return [each for each in head if each.statement.lineno > line]


def head_imports(source: bytes, path: str) -> list[HeadImport]:
    """Return the imports of installed packages and of the standard library that precede every other statement.

    The docstring, imports from ``__future__`` and ``if TYPE_CHECKING:`` do not end the head. Everything else does, such
    as an assignment to ``os.environ``, because it may change what a later import does. So does the import of a module
    that is not installed, because its code may do the same.

    Args:
        source: the content of the script.
        path: the path of the script.
    """
    found = []
    for number, statement in enumerate(_statements(source)):
        if not _is_in_head(number, statement):
            break
        if (modules := _imported(statement)) is not None:
            found.append(HeadImport(statement, modules, path))
    return found


def end_of_head(source: bytes) -> int | None:
    """Return the line of the statement that ends the head of a script, if any import is there or below; otherwise None.

    Args:
        source: the content of the script.
    """
    statements = _statements(source)
    for number, statement in enumerate(statements):
        if not _is_in_head(number, statement):
            has_imports = any(isinstance(later, (ast.Import, ast.ImportFrom)) for later in statements[number:])
            return statement.lineno if has_imports else None
    return None


def _is_in_head(number: int, statement: ast.stmt) -> bool:
    if (number == 0 and _is_docstring(statement)) or _is_for_type_checkers(statement):
        return True
    modules = _imported(statement)
    return modules is not None and all(map(_is_installed, modules))


def _statements(source: bytes) -> list[ast.stmt]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the interpreter shows them when it compiles the script
        try:
            return ast.parse(source).body
        except (SyntaxError, ValueError):
            return []


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_for_type_checkers(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    name = getattr(statement.test, "id", None) or getattr(statement.test, "attr", None)
    return name == "TYPE_CHECKING"


def _imported(statement: ast.stmt) -> tuple[str, ...] | None:
    """Return the names of the modules that a statement imports; None if it is no import."""
    if isinstance(statement, ast.Import):
        return tuple(alias.name for alias in statement.names)
    if isinstance(statement, ast.ImportFrom):
        return (statement.module,) if statement.module and not statement.level else None
    return None


def _is_installed(module: str) -> bool:
    root = module.partition(".")[0]
    places = list(_places(root))
    if root in sys.stdlib_module_names:  # unless a file next to the script has the same name
        return os.path.abspath(sys.path[0]) not in map(os.path.dirname, places)
    return root.partition("_")[0] == "drivetrain" or any(map(is_in_site, places))


def _places(root: str) -> Iterator[str]:
    """Yield the paths of a module or package."""
    try:
        spec = sys.modules[root].__spec__ if root in sys.modules else importlib.util.find_spec(root)
    except (ImportError, ValueError, AttributeError):
        return
    if spec is not None:
        yield from [spec.origin] if spec.origin else []
        yield from spec.submodule_search_locations or ()
