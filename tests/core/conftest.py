"""Fixtures shared by several tests of the core."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs tiny distributions: one module each, with the metadata of an installer."""
    site = tmp_path / "site"
    site.mkdir()

    def make(
        name: str,
        module: str,
        source: str,
        entry_points: Mapping[str, Mapping[str, str]],
        requires: Sequence[str] = (),
    ) -> Path:
        (site / f"{module}.py").write_text(source)
        info = site / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        required = "".join(f"Requires-Dist: {line}\n" for line in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n{required}")
        lines = []
        for group, targets in entry_points.items():
            lines += [f"[{group}]", *(f"{key} = {target}" for key, target in targets.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(site)
        return site

    return make
