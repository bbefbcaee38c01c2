"""The non-zero cells of the traffic as a table, in CSV or Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comm.report.reading import Result
from comm.report.store import CSV_HEADER, traffic_cells, write_csv, write_whole

NUMBERS = ("layer", "src", "dst", "bytes")  # of CSV_HEADER; the other columns are names
PYARROW = 'to=parquet: needs pyarrow; pip install "wideep[parquet]", or to=csv'


def save_csv(result: Result, path: Path) -> None:
    """As traffic.csv of a run."""
    traffic, tiers = result.traffic, result.tiers
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: write_csv(file, traffic, tiers))


def save_parquet(result: Result, path: Path) -> None:
    """The same columns; names as dictionaries. Raises ValueError without pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(PYARROW) from error
    cells = list(traffic_cells(result.traffic, result.tiers))
    columns: list[Any] = list(zip(*cells, strict=True)) or [()] * len(CSV_HEADER)
    names = pyarrow.dictionary(pyarrow.int8(), pyarrow.string())
    arrays = [
        pyarrow.array(column, pyarrow.int64() if name in NUMBERS else names)
        for name, column in zip(CSV_HEADER, columns, strict=True)
    ]
    table = pyarrow.table(arrays, names=list(CSV_HEADER))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: parquet.write_table(table, file))
