"""The conformance kits, as the authors of the installed plugins would run them. ``test_kits.py`` runs this file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from acme_lines import LineDatasets, LineFile
from acme_sqlite import SqliteFileSystem

from drivetrain_testing import (
    CallbackConformance,
    DatasetConformance,
    PolicyConformance,
    RuntimeCapability,
    RuntimeConformance,
    StorageConformance,
)
from drivetrain_torch.testing import StrategyConformance


class TestLineDatasets(DatasetConformance):
    provider = LineDatasets

    def make_dataset(self, directory: Path, rows: int) -> LineFile:
        lines = [json.dumps({"id": number, "group": number // 10}) for number in range(rows)]
        (directory / "lines.jsonl").write_text("\n".join(lines) + "\n")
        return LineFile(str(directory / "lines.jsonl"))


class TestWebhook(CallbackConformance):
    name = "webhook"
    options: ClassVar[Mapping[str, Any]] = {"url": "http://127.0.0.1:9/events"}


class TestExponentialBackoff(PolicyConformance):
    name = "exponential_backoff"
    options: ClassVar[Mapping[str, Any]] = {"first_s": 1.0}


class TestAverageGradients(StrategyConformance):
    name = "acme_average"


class TestSqliteFileSystem(StorageConformance):
    def make_filesystem(self, directory: Path) -> tuple[Any, str]:
        return SqliteFileSystem(str(directory / "files.db")), "runs"


class TestProcesses(RuntimeConformance):
    runtime = "acme_processes"
    capabilities = frozenset(RuntimeCapability)
