"""Parts of results written again with something changed, by NumPy alone; and in Parquet, as earlier versions did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from attncheck.results.format import ARRAY_SCHEMA
from attncheck.results.parts import read_rows_part
from attncheck.results.tables import RowTable, TableFile
from attncheck.results.writer import write_table

Arrays = dict[str, Any]


def change_part(path: Path, change: Callable[[Arrays], None]) -> None:
    """Change the arrays of a part of rows."""
    with np.load(path) as file:
        arrays = dict(file)
    change(arrays)
    with path.open("wb") as file:
        np.savez(file, **arrays)


def set_column(arrays: Arrays, name: str, value: Any) -> None:
    """Give every row one value: a text in a column of texts, else whatever it is."""
    count = len(arrays[name])
    arrays.pop(f"{name}.null", None)
    if f"{name}.words" in arrays:
        arrays[name] = np.zeros(count, np.uint8)
        arrays[f"{name}.words"] = np.frombuffer(json.dumps([value]).encode(), np.uint8)
    else:
        arrays[name] = np.array([value] * count)


def take_rows(path: Path, rows: list[int]) -> None:
    """Keep these rows of a part, some of them more than once."""
    table: RowTable = read_rows_part(path)
    write_table(path, table.take(np.array(rows, dtype=np.int64)))


def split_arrays(path: Path, count: int) -> None:
    """Write a part of arrays as parts of so many blocks each."""
    with TableFile(path, 2**30, 10**6) as file:
        table = file.read_columns(ARRAY_SCHEMA)
        number = int(table["block"].array.max()) + 1
        blocks = [file.read_block(block) for block in range(number)]
    for part, first in enumerate(range(0, number, count)):
        of_part = table.take((table["block"].array >= first) & (table["block"].array < first + count))
        columns = {**of_part.columns, "block": of_part["block"]._replace(array=of_part["block"].array - first)}
        path_of_part = path.with_name(f"part-{part:05d}.npz")
        write_table(path_of_part, RowTable(columns), ARRAY_SCHEMA, blocks[first : first + count])
