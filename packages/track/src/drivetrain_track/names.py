"""Names of metrics and parameters for services that restrict names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

__all__ = ["Names"]

_DIGEST_CHARS = 8


class Names:
    """Converts names to names that a service accepts. Different names stay different.

    A name that the service accepts is not changed. If a name becomes equal to another one, or is too long, it ends with
    a digest of the original name.

    Args:
        clean: returns a name that consists of allowed characters only.
        limit: the maximum number of characters.
    """

    def __init__(self, clean: Callable[[str], str], limit: int) -> None:
        self._clean = clean
        self._limit = limit
        self._converted: dict[str, str] = {}
        self._taken: set[str] = set()

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Return the converted names by original name, also those of earlier calls."""
        new = [name for name in dict.fromkeys(names) if name not in self._converted]
        # Allowed names come first, so that a changed name does not take one of them.
        for name in sorted(new, key=lambda name: self._clean(name) != name):
            converted = self._clean(name)
            if len(converted) > self._limit or converted in self._taken:
                digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:_DIGEST_CHARS]
                converted = f"{converted[: self._limit - _DIGEST_CHARS - 1]}_{digest}"
            self._taken.add(converted)
            self._converted[name] = converted
        return self._converted
