"""Lines of code: ``python -m tests.lines`` prints how many each package has."""

import ast
from pathlib import Path

PACKAGES = Path(__file__).parents[1] / "packages"


def count_lines(source: str) -> int:
    """Return the number of lines of a module that are not blank, comments or docstrings."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    return sum(number not in docstrings and text.strip()[:1] not in ("", "#") for number, text in lines)


def main() -> None:
    """Print the lines of code of each package, and of all."""
    total = 0
    for package in sorted(PACKAGES.iterdir()):
        files = [*package.glob("src/**/*.py")]
        if files:
            lines = sum(count_lines(file.read_text()) for file in files)
            print(f"{package.name:<12} {lines:>7,}")
            total += lines
    print(f"{'all':<12} {total:>7,}")


if __name__ == "__main__":
    main()
