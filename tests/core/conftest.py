"""What several tests of the core share."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs tiny distributions: a module each, and the metadata that an installer would write."""
    site = tmp_path / "site"
    site.mkdir()

    def make(name: str, module: str, source: str, entry_points: Mapping[str, Mapping[str, str]]) -> Path:
        (site / f"{module}.py").write_text(source)
        info = site / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        lines = []
        for group, targets in entry_points.items():
            lines += [f"[{group}]", *(f"{key} = {target}" for key, target in targets.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(site)
        return site

    return make
