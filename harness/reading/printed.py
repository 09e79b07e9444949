"""Numbers as a document prints them: their decimal value, and the half unit that the printing rounded away.

A printed array is written as the document shows it, one row a line, numbers apart by white space, or pasted as a
library prints it (docs/cases.md, section 8).

``.`` stands for an element that the document does not give; ``inf``, ``-inf`` and ``nan`` for themselves. In brackets a
row may go over several lines; R's labels, ``[1,]``, are left out. What leaves numbers out (``...``) is refused, as is
what could be read in two ways: ``[1,000 2]``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.shapes import format_shape

NestedTexts: TypeAlias = "list[NestedTexts] | str"
"""Texts of numbers, nested as the array is."""

MAX_AXES = 5
# A choice: the characters of a number that a message quotes.
_MAX_SHOWN = 40
ELLIPSIS_PATTERN = r"\.\.\.|…"
"""A library's sign for numbers that it leaves out."""
_ELLIPSIS = re.compile(ELLIPSIS_PATTERN)
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
_CLOSING_PARENTHESIS = re.compile(r"\s*,?\s*\)")
_R_LINE = re.compile(r"\s*(?:(?:\[,\d+\]\s*)+$|\[(\d+)(,?)\]\s+(?=[^\s,\[\]][^,\[\]]*$))", re.ASCII)
"""What begins every line that R prints: a line of column labels, ``[2,]`` before a row, ``[2]`` in a vector."""
_BRACKET = re.compile(r"[\[\]()<>]")


class PrintedError(ValueError):
    """A printed array that cannot be read; the message says which row or number."""


def split_printed_numbers(text: str) -> NestedTexts:
    """Split a text into numbers, nested as the array is; one row is a vector, one number a scalar.

    Raises ``PrintedError`` if rows are ragged and for what is no array.

    Example:
        >>> split_printed_numbers("tensor([1.50, -2.00], dtype=torch.float16)")
        ['1.50', '-2.00']
    """
    if _ELLIPSIS.search(text):
        raise PrintedError(
            "'...' leaves numbers out; print the whole array (numpy.set_printoptions(threshold=sys.maxsize), "
            "torch.set_printoptions(profile='full')), or write . for each number that the document does not give"
        )
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and all(map(_R_LINE.match, lines)):
        return _split_r_output(lines)
    if _BRACKET.search(text):
        return _BracketParser(text).read_arrays()
    return _split_plain_rows(lines)


def max_number_count(text: str) -> int:
    """Return about how many numbers a text holds, and never fewer, without reading it."""
    return len(re.findall(r"[^\s,\[\]]+", text))


def nested_shape(cells: NestedTexts) -> tuple[int, ...]:
    """Return the shape of nested numbers. Raises ``PrintedError`` if they are ragged."""
    if isinstance(cells, str):
        return ()
    shapes = [nested_shape(cell) for cell in cells]
    for number, shape in enumerate(shapes, start=1):
        if shape != shapes[0]:
            raise PrintedError(
                f"ragged: entry {number} has shape {format_shape(shape)}, entry 1 has shape {format_shape(shapes[0])}"
            )
    return (len(cells), *shapes[0])


def _split_plain_rows(lines: list[str]) -> NestedTexts:
    rows = _require_equal_lengths([_split_plain_row(line, number) for number, line in enumerate(lines, start=1)])
    if len(rows) > 1:
        return [[*row] for row in rows]
    return [*rows[0]] if len(rows[0]) > 1 else rows[0][0]


def _require_equal_lengths(rows: list[list[str]]) -> list[list[str]]:
    """Return rows that are all as long as the first."""
    if not rows:
        raise PrintedError("no number is given")
    width = len(rows[0])
    for number, row in enumerate(rows, start=1):
        if len(row) != width:
            raise PrintedError(f"ragged rows: {len(row)} in row {number}, {width} in row 1")
    return rows


def _split_plain_row(line: str, number: int) -> list[str]:
    cells = re.split(r",\s+", line.strip().removesuffix(","))
    if len(cells) == 1 and "," not in cells[0] and cells[0].strip():
        return cells[0].split()
    for cell in cells:
        if "," in cell:
            raise PrintedError(
                f"row {number}: {cell[:_MAX_SHOWN]!r} may be one number or several; write a decimal point as a point, "
                "leave out what groups digits, and put a space behind a comma that sets numbers apart"
            )
        if len(cell.split()) != 1:
            raise PrintedError(f"row {number}: expected one number between two commas, got {cell[:_MAX_SHOWN]!r}")
    return cells


def _split_r_output(lines: list[str]) -> NestedTexts:
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
            got = label[0].strip()[:_MAX_SHOWN]
            raise PrintedError(f"expected R's label {wanted}, got {got}; paste all rows, in their order")
        rows[row - 1] += line[label.end() :].split()
    if vector:
        return [number for numbers in rows for number in numbers]
    return [[*numbers] for numbers in _require_equal_lengths(rows)]


class _BracketParser:
    """Reads what a library prints: brackets in which numbers are apart by spaces or by commas, with what stands around.

    The whole text sets numbers apart in one way, or what groups digits could pass for it.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._offset = 0
        self._separator_so_far: str | None = None

    def read_arrays(self) -> NestedTexts:
        """Read the whole text; several arrays one after another are the entries of one.

        Raises ``PrintedError`` if that is no array.
        """
        arrays = [self._read_array()]
        while self._skip_match(_SEPARATOR) and self._offset < len(self._text):
            arrays.append(self._read_array())
        if len(arrays) > 1 and any(isinstance(array, str) for array in arrays):
            raise PrintedError("numbers stand outside of the brackets; expected one array, or several of a shape")
        return arrays[0] if len(arrays) == 1 else arrays

    def _read_array(self) -> NestedTexts:
        """Read an array with what its library writes around it."""
        self._skip_match(_SPACE)
        opened = _TF_ARRAY.match(self._text, self._offset)
        self._offset = opened.end() if opened else self._offset
        called = self._skip_match(_ARRAY)
        array = self._read_value(0)
        if called:
            self._skip_attributes(array)
        if opened:
            _check_shape(opened[1], array)
            if not self._skip_character(">"):
                raise self._unexpected_text_error("'>' behind the array")
        return array

    def _read_value(self, depth: int) -> NestedTexts:
        self._skip_match(_SPACE)
        if not self._skip_character("["):
            return self._read_number()
        if depth == MAX_AXES:
            raise PrintedError(f"{self._line_text()}: expected at most {MAX_AXES} axes, got brackets that are deeper")
        if self._skip_character("]"):
            raise PrintedError(f"{self._line_text()}: [] holds no number")
        values = [self._read_value(depth + 1)]
        while not self._skip_character("]"):
            between = self._skip_separator()
            if self._skip_character("]"):  # behind a last comma
                break
            values.append(self._read_value(depth + 1))
            if isinstance(values[-1], str):
                self._check_separator(between, values[-1])
        return values

    def _read_number(self) -> str:
        match = _SCALAR.match(self._text, self._offset) or _NUMBER.match(self._text, self._offset)
        if not match:
            raise self._unexpected_text_error("a number or '['")
        self._offset = match.end()
        return match[1]

    def _skip_separator(self) -> str:
        """Pass over what stands between two entries, and return it: a blank, a comma, or both."""
        match = _SEPARATOR.match(self._text, self._offset)
        assert match is not None, "it may be empty"
        if not match[0] and not self._text.startswith("[", self._offset):
            raise self._unexpected_text_error("']'")
        self._offset = match.end()
        wrapped = "\n" in match[2] and self._separator_so_far == ","
        return " " if not match[1] else ", " if match[2] and not wrapped else ","

    def _check_separator(self, between: str, number: str) -> None:
        if self._separator_so_far not in (None, between):
            here, before = _SEPARATOR_WORDS[between], _SEPARATOR_WORDS[str(self._separator_so_far)]
            raise PrintedError(
                f"{self._line_text()}: {number[:_MAX_SHOWN]!r} and the number before it are set apart by {here}, "
                f"others by {before}; leave out what groups digits, and separate all in one way"
            )
        self._separator_so_far = between

    def _skip_attributes(self, array: NestedTexts) -> None:
        """Pass over dtype=..., grad_fn=<...> and the like up to the closing parenthesis; a shape has to be right."""
        while match := _ATTRIBUTE.match(self._text, self._offset):
            self._offset = match.end()
            if match[1] == "shape":
                _check_shape(match[2], array)
        if not self._skip_match(_CLOSING_PARENTHESIS):
            raise self._unexpected_text_error("')' behind the array")

    def _skip_character(self, character: str) -> bool:
        """Pass over one character, and the space before it, if it comes next."""
        match = _SPACE.match(self._text, self._offset)
        if match is None or not self._text.startswith(character, match.end()):
            return False
        self._offset = match.end() + 1
        return True

    def _skip_match(self, pattern: re.Pattern[str]) -> bool:
        match = pattern.match(self._text, self._offset)
        self._offset = match.end() if match else self._offset
        return match is not None

    def _line_text(self) -> str:
        return f"line {self._text.count(chr(10), 0, self._offset) + 1}"

    def _unexpected_text_error(self, wanted: str) -> PrintedError:
        rest = self._text[self._offset : self._offset + _MAX_SHOWN].split(maxsplit=1)
        return PrintedError(
            f"{self._line_text()}: expected {wanted}, got {repr(rest[0]) if rest else 'the end of the text'}"
        )


def _check_shape(shape: str | None, array: NestedTexts) -> None:
    """Refuse an array whose library says another shape than what was read: a part of it was not pasted."""
    read_shape = nested_shape(array)
    if shape is not None and re.findall(r"\d+", shape) != [str(length) for length in read_shape]:
        raise PrintedError(f"the text says shape={shape[:_MAX_SHOWN]} and holds {format_shape(read_shape)}")


_SEPARATOR_WORDS = {" ": "spaces alone", ", ": "a comma and a space", ",": "a comma alone"}


OMITTED_NUMBER = "."
_NON_FINITE = {"inf", "+inf", "-inf", "nan"}
# No digit can be matched in two ways: a long row of them that is no number after all would be tried in all of them.
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_LARGEST_EXPONENT = 308
"""The decimal exponent of the largest float64, 1.8e308."""
_SMALLEST_EXPONENT = -400
"""Below float64's range, because documents print such numbers: 5.77e-340."""
_INDEX_WORDS = ("number", "row", "matrix", "block")
MAX_NUMBERS = 30_000
"""The most numbers of one printed array: as many as a file may spell out one by one."""


@dataclass(frozen=True)
class PrintedRounding:
    """The rounding of numbers that are printed; by default each has as many decimals as it shows."""

    exact: bool = False
    decimals: int | None = None
    significant_digits: int | None = None
    truncated: bool = False
    units_off: int = 0


@dataclass(frozen=True)
class PrintedArray:
    """A printed array, element by element.

    Its text, its value to the nearest float64, half a unit of its last digit (and as many whole ones as the digit may
    be off by), and whether the document gives it at all. Of ``truncated`` numbers the digits behind the last were cut
    off.
    """

    text: NDArray[np.object_]
    value: NDArray[np.float64]
    half_unit: NDArray[np.float64]
    given: NDArray[np.bool_]
    truncated: bool = False

    @property
    def radius(self) -> NDArray[np.float64]:
        """Return how far the number that was printed may lie from what stands there."""
        return 2 * self.half_unit if self.truncated else self.half_unit

    def radius_on_side_of(self, numbers: NDArray[Any]) -> NDArray[np.float64]:
        """Return how far the number that was printed may lie from what stands there, on the side of other numbers.

        What was cut off lay away from zero, and of a printed zero on either side.
        """
        if not self.truncated:
            return self.half_unit
        with np.errstate(invalid="ignore"):
            inwards = np.where(self.value > 0, numbers < self.value, (self.value < 0) & (numbers > self.value))
        return np.where(inwards, 0.0, 2 * self.half_unit)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in which the array is printed."""
        return self.text.shape

    def rearrange(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> PrintedArray:
        """Return the numbers, laid out in another way."""
        text, value, half_unit, is_given = map(change, (self.text, self.value, self.half_unit, self.given))
        return PrintedArray(text, value, half_unit, is_given, self.truncated)


def parse_printed(source: object, rounding: PrintedRounding) -> PrintedArray:
    """Read a printed array from text, or from nested lists of texts for ranks above two.

    Raises ``PrintedError`` for ragged rows and for what is no number.

    Example:
        >>> parse_printed("0.50 1.2", PrintedRounding()).half_unit.tolist()
        [0.005, 0.05]
        >>> parse_printed("0.50 .", PrintedRounding(exact=True)).value.tolist()  # the document omits the second number
        [0.5, nan]
    """
    cells = _split_nested(source)
    shape = nested_shape(cells)
    if len(shape) > MAX_AXES:
        raise PrintedError(f"expected at most {MAX_AXES} axes, got {len(shape)}")
    if math.prod(shape) > MAX_NUMBERS:
        raise PrintedError(f"{math.prod(shape)} numbers; expected at most {MAX_NUMBERS}")
    text = np.array(cells, dtype=object)
    value, half_unit = np.empty(shape), np.empty(shape)
    for index, number in np.ndenumerate(text):
        try:
            value[index], half_unit[index] = _parse_number(number, rounding)
        except PrintedError as error:
            raise PrintedError(f"{_index_prefix(index)}{error}") from None
    return PrintedArray(text, value, half_unit, text != np.array(OMITTED_NUMBER, dtype=object), rounding.truncated)


def make_exact_printed_array(array: NDArray[np.float64]) -> PrintedArray:
    """Return numbers that are known to the last bit. Raises ``PrintedError`` for too many."""
    if array.size > MAX_NUMBERS:
        raise PrintedError(f"{array.size} numbers; expected at most {MAX_NUMBERS}")
    text = np.array([repr(number) for number in array.ravel().tolist()], dtype=object).reshape(array.shape)
    return PrintedArray(text, array, np.zeros(array.shape), np.ones(array.shape, dtype=np.bool_))


def _split_nested(source: object) -> NestedTexts:
    """Split texts into numbers; a list of texts has one axis more."""
    if isinstance(source, list):
        if not source:
            raise PrintedError("no number is given")
        return [_split_nested(item) for item in source]
    if not isinstance(source, str):
        lost = ": a bare number would lose its last digits" if isinstance(source, int | float) else ""
        raise PrintedError(f"expected text in quotes, got {source!r:.40}{lost}")
    return split_printed_numbers(source)


def _index_prefix(index: tuple[int, ...]) -> str:
    """Return the place of a number in words: "row 2, number 1: "."""
    words = [f"{word} {number + 1}" for word, number in zip(_INDEX_WORDS, reversed(index), strict=False)]
    return f"{', '.join(reversed(words))}: " if words else ""


def _parse_number(text: str, rounding: PrintedRounding) -> tuple[float, float]:
    """Return the nearest float64 and half a unit of the last printed digit."""
    if text == OMITTED_NUMBER:
        return np.nan, 0.0
    if text.lower() in _NON_FINITE:
        return float(text), 0.0
    if not _DECIMAL.fullmatch(text):
        raise PrintedError(f"{text[:40]!r} is not a number")
    try:
        number = Decimal(text)
    except InvalidOperation:  # an exponent of twenty digits
        raise PrintedError(f"{text[:40]!r} is beyond the range of float64") from None
    if number.adjusted() > _LARGEST_EXPONENT or np.isinf(float(number)):
        raise PrintedError(f"{text[:40]!r} is beyond the range of float64")
    if number and number.adjusted() < _SMALLEST_EXPONENT:
        raise PrintedError(f"{text[:40]!r} is closer to zero than 1e{_SMALLEST_EXPONENT}")
    return float(number), 0.0 if rounding.exact else _half_unit_of_last_digit(number, rounding)


def _half_unit_of_last_digit(number: Decimal, rounding: PrintedRounding) -> float:
    if rounding.decimals is not None:
        exponent = -rounding.decimals
    elif rounding.significant_digits is not None:
        exponent = number.adjusted() - rounding.significant_digits + 1
    else:
        exponent = int(number.as_tuple().exponent)
    halves = 1 + 2 * rounding.units_off
    return halves * float(Decimal(5).scaleb(exponent - 1)) if exponent > _SMALLEST_EXPONENT else 0.0
