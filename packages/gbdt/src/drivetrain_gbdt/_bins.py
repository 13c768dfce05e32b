"""Bins that are the same on all workers, and are computed from the rows of all workers.

LightGBM divides each feature into bins before it trains. In a network, it computes the bins of each feature from the
rows of one worker only. If the rows are in the order of a feature, these bins cover only a part of its values, and the
model is bad. Therefore the workers exchange a sample of their rows before LightGBM connects them, and each computes the
same bins from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from drivetrain_gbdt._network import Peers
from drivetrain_gbdt._parameters import find

__all__ = ["Sample", "sample_of_all_workers"]

_SAMPLE_ROWS = 200_000  # LightGBM's default of bin_construct_sample_cnt
_SAMPLE_SEED = 1  # LightGBM's default of data_random_seed


class Sample(NamedTuple):
    """Rows of all workers.

    Attributes:
        features: the rows, in the order of the ranks.
        complete: True if these are all rows.
    """

    features: pa.Table
    complete: bool


def sample_of_all_workers(peers: Peers, features: pa.Table, params: Mapping[str, Any]) -> Sample:
    """Exchange a sample of the rows of all workers. Every worker must call this function.

    Args:
        peers: the workers.
        features: the features of this worker's rows.
        params: LightGBM's parameters, of which ``bin_construct_sample_cnt`` and ``data_random_seed`` are used.

    Returns:
        The same rows on every worker; all rows of all workers if they are not more than the sample.
    """
    limit = int(find(params, "bin_construct_sample_cnt", _SAMPLE_ROWS))
    with peers.connected():
        rows = [int.from_bytes(count, "big") for count in peers.gather(features.num_rows.to_bytes(8, "big"))]
        complete = sum(rows) <= limit
        if not complete:
            generator = np.random.default_rng(int(find(params, "data_random_seed", _SAMPLE_SEED)))
            share = min(-(-limit * features.num_rows // sum(rows)), features.num_rows)
            features = features.take(np.sort(generator.choice(features.num_rows, share, replace=False)))
        parts = peers.gather(_to_bytes(features))
    return Sample(pa.concat_tables(map(_from_bytes, parts)), complete)


def _to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    return bytes(sink.getvalue())


def _from_bytes(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as stream:
        return stream.read_all()
