"""The numbers of a printed array, taken out of its text as they stand there: no digit is read or changed here.

A text is plain rows, one a line, or what a library prints, pasted as it is:

    0.08 0.03        [[0.08 0.03]        tensor([[0.08, 0.03],        <tf.Tensor: shape=(2, 2), dtype=float32, numpy=
    0.03 0.09         [0.03 0.09]]               [0.03, 0.09]])        array([[0.08, 0.03], [0.03, 0.09]])>

In brackets a row may go over several lines; R's labels, ``[1,]``, are left out. What leaves numbers out (``...``) is
refused, as is what could be read in two ways: ``[1,000 2]``.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from attncheck.reading.shapes import show

Cells: TypeAlias = "list[Cells] | str"
"""Texts of numbers, nested as the array is."""

MAX_AXES = 5
_SHOWN = 40
LEFT_OUT = r"\.\.\.|…"
"""Stands where a library leaves numbers out."""
_LEFT_OUT = re.compile(LEFT_OUT)
_NUMBER = re.compile(r"([^\s,()\[\]<>=]+)")
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*(,?)(\s*)")
_MODULE = r"(?:(?:np|numpy|torch|tf|jnp|jax\.numpy|cp|mx)\.)?"
_ARRAY = re.compile(
    rf"(?:Parameter containing:\s*)?{_MODULE}(?:[Aa]rray|asarray|[Tt]ensor|DeviceArray|constant|matrix)\("
)
_SCALAR = re.compile(rf"{_MODULE}(?:b?float|longdouble|int)[0-9]*\(([^()\s,]*)\)")
_TF_ARRAY = re.compile(r"<tf\.(?:Tensor|Variable)[^<>\[\]]*?\bshape=(\([\d, ]*\))[^<>\[\]]*?\bnumpy=\s*")
_ATTRIBUTE = re.compile(r"\s*,\s*([a-z_]+)=(<[^<>]*>|'[^']*'|\([\d, ]*\)|[\w.:]+)")
_CLOSE = re.compile(r"\s*,?\s*\)")
_R_LINE = re.compile(r"\s*(?:(?:\[,\d+\]\s*)+$|\[(\d+)(,?)\]\s+(?=[^\s,\[\]][^,\[\]]*$))", re.ASCII)
"""What begins every line that R prints: a line of column labels, ``[2,]`` before a row, ``[2]`` in a vector."""
_IS_MARKED = re.compile(r"[\[\]()<>]")


class PrintedError(ValueError):
    """A printed array that cannot be read; the message says which row or number."""


def split_numbers(text: str) -> Cells:
    """Split a text into numbers, nested as the array is; one row is a vector, one number a scalar.

    Raises ``PrintedError`` where rows are ragged and for what is no array.
    """
    if _LEFT_OUT.search(text):
        raise PrintedError(
            "'...' leaves numbers out; print the whole array (numpy.set_printoptions(threshold=sys.maxsize), "
            "torch.set_printoptions(profile='full')), or write . for each number that the document does not give"
        )
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and all(map(_R_LINE.match, lines)):
        return _r_rows(lines)
    if _IS_MARKED.search(text):
        return _Brackets(text).read()
    return _plain_rows(lines)


def count_numbers(text: str) -> int:
    """Return about how many numbers a text holds, and never fewer, without reading it."""
    return len(re.findall(r"[^\s,\[\]]+", text))


def shape_of(cells: Cells) -> tuple[int, ...]:
    """Return the shape of nested numbers. Raises ``PrintedError`` where they are ragged."""
    if isinstance(cells, str):
        return ()
    shapes = [shape_of(cell) for cell in cells]
    for number, shape in enumerate(shapes, start=1):
        if shape != shapes[0]:
            raise PrintedError(f"ragged: entry {number} has shape {show(shape)}, entry 1 has shape {show(shapes[0])}")
    return (len(cells), *shapes[0])


def _plain_rows(lines: list[str]) -> Cells:
    rows = _even([_plain_row(line, number) for number, line in enumerate(lines, start=1)])
    if len(rows) > 1:
        return [[*row] for row in rows]
    return [*rows[0]] if len(rows[0]) > 1 else rows[0][0]


def _even(rows: list[list[str]]) -> list[list[str]]:
    """Return rows that are all as long as the first."""
    if not rows:
        raise PrintedError("no number is given")
    width = len(rows[0])
    for number, row in enumerate(rows, start=1):
        if len(row) != width:
            raise PrintedError(f"ragged rows: {len(row)} in row {number}, {width} in row 1")
    return rows


def _plain_row(line: str, number: int) -> list[str]:
    cells = re.split(r",\s+", line.strip().removesuffix(","))
    if len(cells) == 1 and "," not in cells[0] and cells[0].strip():
        return cells[0].split()
    for cell in cells:
        if "," in cell:
            raise PrintedError(
                f"row {number}: {cell[:_SHOWN]!r} may be one number or several; write a decimal point as a point, "
                "leave out what groups digits, and put a space behind a comma that sets numbers apart"
            )
        if len(cell.split()) != 1:
            raise PrintedError(f"row {number}: expected one number between two commas, got {cell[:_SHOWN]!r}")
    return cells


def _r_rows(lines: list[str]) -> Cells:
    """Leave out R's labels, and put together what it prints in several blocks of columns, or lines of a vector."""
    rows: list[list[str]] = []
    row, vector = 0, False
    for line in lines:
        label = _R_LINE.match(line)
        assert label is not None, "every line was matched before"
        if label[1] is None:
            row = 0
            continue
        vector, row = not label[2], row + 1
        if row > len(rows):
            rows.append([])
        wanted = f"[{1 + sum(map(len, rows))}]" if vector else f"[{row},]"
        if label[0].strip() != wanted:
            got = label[0].strip()[:_SHOWN]
            raise PrintedError(f"expected R's label {wanted}, got {got}; paste all rows, in their order")
        rows[row - 1] += line[label.end() :].split()
    if vector:
        return [number for numbers in rows for number in numbers]
    return [[*numbers] for numbers in _even(rows)]


class _Brackets:
    """Reads what a library prints: brackets in which numbers are apart by spaces or by commas, with what stands around.

    The whole text sets numbers apart in one way, or what groups digits could pass for it.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._between: str | None = None

    def read(self) -> Cells:
        """Read the whole text; several arrays one after another are the entries of one.

        Raises ``PrintedError`` where that is no array.
        """
        arrays = [self._array()]
        while self._skip(_SEPARATOR) and self._at < len(self._text):
            arrays.append(self._array())
        if len(arrays) > 1 and any(isinstance(array, str) for array in arrays):
            raise PrintedError("numbers stand outside of the brackets; expected one array, or several of a shape")
        return arrays[0] if len(arrays) == 1 else arrays

    def _array(self) -> Cells:
        """Read an array with what its library writes around it."""
        self._skip(_SPACE)
        opened = _TF_ARRAY.match(self._text, self._at)
        self._at = opened.end() if opened else self._at
        called = self._skip(_ARRAY)
        array = self._value(0)
        if called:
            self._attributes(array)
        if opened:
            _check_shape(opened[1], array)
            if not self._take(">"):
                raise self._unexpected("'>' behind the array")
        return array

    def _value(self, depth: int) -> Cells:
        self._skip(_SPACE)
        if not self._take("["):
            return self._number()
        if depth == MAX_AXES:
            raise PrintedError(f"{self._where()}: expected at most {MAX_AXES} axes, got brackets that are deeper")
        if self._take("]"):
            raise PrintedError(f"{self._where()}: [] holds no number")
        values = [self._value(depth + 1)]
        while not self._take("]"):
            between = self._separator()
            if self._take("]"):  # behind a last comma
                break
            values.append(self._value(depth + 1))
            if isinstance(values[-1], str):
                self._check_separator(between, values[-1])
        return values

    def _number(self) -> str:
        found = _SCALAR.match(self._text, self._at) or _NUMBER.match(self._text, self._at)
        if not found:
            raise self._unexpected("a number or '['")
        self._at = found.end()
        return found[1]

    def _separator(self) -> str:
        """Pass over what stands between two entries, and return it: a blank, a comma, or both."""
        found = _SEPARATOR.match(self._text, self._at)
        assert found is not None, "it may be empty"
        if not found[0] and not self._text.startswith("[", self._at):
            raise self._unexpected("']'")
        self._at = found.end()
        wrapped = "\n" in found[2] and self._between == ","
        return " " if not found[1] else ", " if found[2] and not wrapped else ","

    def _check_separator(self, between: str, number: str) -> None:
        if self._between not in (None, between):
            raise PrintedError(
                f"{self._where()}: {number[:_SHOWN]!r} and the number before it are set apart by {_NAMED[between]}, "
                f"others by {_NAMED[str(self._between)]}; leave out what groups digits, and separate all in one way"
            )
        self._between = between

    def _attributes(self, array: Cells) -> None:
        """Pass over dtype=..., grad_fn=<...> and the like up to the closing parenthesis; a shape has to be right."""
        while found := _ATTRIBUTE.match(self._text, self._at):
            self._at = found.end()
            if found[1] == "shape":
                _check_shape(found[2], array)
        if not self._skip(_CLOSE):
            raise self._unexpected("')' behind the array")

    def _take(self, character: str) -> bool:
        """Pass over one character, and the space before it, if it comes next."""
        found = _SPACE.match(self._text, self._at)
        if found is None or not self._text.startswith(character, found.end()):
            return False
        self._at = found.end() + 1
        return True

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found is not None

    def _where(self) -> str:
        return f"line {self._text.count(chr(10), 0, self._at) + 1}"

    def _unexpected(self, wanted: str) -> PrintedError:
        rest = self._text[self._at : self._at + _SHOWN].split(maxsplit=1)
        return PrintedError(
            f"{self._where()}: expected {wanted}, got {repr(rest[0]) if rest else 'the end of the text'}"
        )


def _check_shape(shape: str | None, array: Cells) -> None:
    """Refuse an array whose library says another shape than what was read: a part of it was not pasted."""
    found = shape_of(array)
    if shape is not None and re.findall(r"\d+", shape) != [str(length) for length in found]:
        raise PrintedError(f"the text says shape={shape[:_SHOWN]} and holds {show(found)}")


_NAMED = {" ": "spaces alone", ", ": "a comma and a space", ",": "a comma alone"}
