"""The conformance kits, as the authors of the installed plugins would run them. ``test_kits.py`` runs this file."""

import json
from pathlib import Path

from acme_lines import LineDatasets, LineFile

from drivetrain.testing import DatasetConformance


class TestLineDatasets(DatasetConformance):
    provider = LineDatasets

    def make_dataset(self, directory: Path, rows: int) -> LineFile:
        lines = [json.dumps({"id": number, "group": number // 10}) for number in range(rows)]
        (directory / "lines.jsonl").write_text("\n".join(lines) + "\n")
        return LineFile(str(directory / "lines.jsonl"))
