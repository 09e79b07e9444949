"""A soundness campaign's rows on disk: what is there is not done again."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from soundness_rows import Row, Unit

_CASES_PER_PART = 10


class Parts:
    """A campaign's rows on disk, so many problems to a file; each is renamed into place when it is whole.

    A file is named by the first and the last number in it. ``missing`` are the numbers below ``cases`` on no file.
    """

    def __init__(self, folder: Path, dtypes: Sequence[str], cases: int) -> None:
        self._folder = folder
        self._rows: dict[int, list[Row]] = defaultdict(list)
        folder.mkdir(parents=True, exist_ok=True)
        whole = {number for path in self.files for number in _numbers_of(path)}
        self.missing = [number for number in range(cases) if number not in whole]
        self._due = Counter(_part_of(number) for number in self.missing for _ in dtypes)

    @property
    def files(self) -> list[Path]:
        """What is whole."""
        return sorted(self._folder.glob("part-*.csv"))

    def add(self, unit: Unit, rows: Sequence[Row]) -> None:
        """Add a unit; its part is written with the last of its units."""
        part = _part_of(unit.number)
        self._rows[part].extend(rows)
        self._due[part] -= 1
        if not self._due[part]:
            self._write(part, sorted(self._rows.pop(part), key=lambda row: (row.number, row.dtype)))

    def _write(self, part: int, rows: Sequence[Row]) -> None:
        numbers = [number for number in self.missing if _part_of(number) == part]
        path = self._folder / f"part-{numbers[0]:06d}-{numbers[-1]:06d}.csv"
        partial = path.with_suffix(".partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [each.name for each in fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
        partial.rename(path)


def _part_of(number: int) -> int:
    return number // _CASES_PER_PART


def _numbers_of(path: Path) -> range:
    first, last = path.stem.split("-")[1:]
    return range(int(first), int(last) + 1)
