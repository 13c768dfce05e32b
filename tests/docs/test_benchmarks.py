"""The table of the page about benchmarks is that of the recorded results."""

from benchmarks import records


def test_table_is_that_of_the_records() -> None:
    shown = records.PAGE.read_text().partition(records.BEGIN)[2].partition(records.END)[0]
    assert shown == records.table()
