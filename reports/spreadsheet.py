"""Frames as CSV that is safe to open in a spreadsheet: no text of a case or of a framework becomes a formula there.

``columns.py`` says what that does to texts. Programs that want them as they are read the Parquet files.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyarrow import csv

# Spreadsheets run what begins like this; some take the full-width forms too, and some pass over leading blanks.
_SIGN = r"[=+\-@\uff1d\uff0b\uff0d\uff20]"
_FORMULA = re.compile(rf"\s*{_SIGN}|[\t\n]")
# Where a list separator is a semicolon, a spreadsheet begins a new cell after one, whatever the quotes say.
_FORMULA_WITHIN = re.compile(rf"([;\t\n]\s*)(?={_SIGN})")
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf|nan)")
_LINE_BREAK = re.compile(r"\r\n?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame as CSV: a line of column names, texts in quotes, numbers in full, nothing for no value."""
    table = pa.Table.from_pandas(frame.assign(**_harmless_columns(frame)), preserve_index=False)
    csv.write_csv(table, path)


def harmless(text: str) -> str:
    """Return a text as a cell that no spreadsheet runs; numbers stay as they are."""
    if _NUMBER.fullmatch(text):
        return text
    text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _LINE_BREAK.sub("\n", text))
    text = _FORMULA_WITHIN.sub(r"\1'", text)
    return f"'{text}" if _FORMULA.match(text) else text


def _harmless_columns(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the columns in which something has to be changed; each text is looked at once."""
    columns = {}
    for name in frame.select_dtypes(exclude=["number", "bool"]).columns:
        texts = [value for value in frame[name].unique() if isinstance(value, str)]
        changed = {text: safe for text in texts if (safe := harmless(text)) != text}
        if changed:
            columns[str(name)] = frame[name].map(lambda value, changed=changed: changed.get(value, value))
    return columns
