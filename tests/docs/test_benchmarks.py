"""The tables of recorded benchmarks in the documentation."""

from pathlib import Path

import pytest

from benchmarks import records


@pytest.mark.parametrize("page", records.TABLES, ids=lambda page: page.name)
def test_page_shows_the_recorded_results(page: Path) -> None:
    text = page.read_text()

    assert records.with_table(text, records.TABLES[page]()) == text, "run: python -m benchmarks.records"
