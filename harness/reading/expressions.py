"""Expressions that select cases by words in their names and tags, and by comparisons of their shapes.

    Lk>64 and not causal
    (softcap or window) and Lq!=Lk
    Lk%8!=0 and 'equal keys'

A word matches a case if its id, its name or one of its tags contains the word, whatever the case of the letters. A
text in quotes is one word, and may hold blanks. A comparison has the letter of an axis on its left, and a whole number
or another axis on its right; ``Lk%8`` is the remainder. It does not match a case that has no such axis. ``not`` binds
closer than ``and``, and ``and`` closer than ``or``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from attncheck.common.errors import UsageError
from attncheck.reading.case import Case
from attncheck.reading.shapes import axis_lengths
from attncheck.spec import AXES

_TOKEN = re.compile(
    r"""\s*(?:(?P<sign>[()%]|[=!<>]=|[=<>])|'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<word>[^\s()%=!<>'"]+))"""
)
_SIGNS: Mapping[str, Callable[[int, int], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_NUMBER = re.compile(r"[0-9]{1,12}")
_MAX_DEEP = 50
_MAX_LETTERS = 1000
_CONNECTIVES = ("and", "or", "not")

_Test = Callable[[tuple[str, ...], Mapping[str, int]], bool]
"""Takes the texts of a case in small letters, and the lengths of its axes."""


@dataclass(frozen=True)
class Expression:
    """An expression that was read."""

    text: str
    _test: _Test

    def matches(self, case: Case) -> bool:
        """Return whether it selects a case."""
        texts = tuple(text.lower() for text in (case.id, case.name, *case.tags))
        return self._test(texts, axis_lengths(case.operation, case.options, case.input_shapes))


@dataclass(frozen=True)
class _Token:
    """A part of the text: a ``sign``, a ``word``, a ``text`` in quotes, or the ``end``."""

    kind: str
    text: str
    column: int

    def is_one(self, kind: str, *texts: str) -> bool:
        return self.kind == kind and self.text in texts


def read_expression(text: str, where: str) -> Expression:
    """Read an expression. Raises ``UsageError``, which names the place ``where`` and points at the fault."""
    if len(text) > _MAX_LETTERS:
        raise UsageError(f"{where}: expected at most {_MAX_LETTERS} characters, got {len(text)}")
    return Expression(text, _Reader(text, where).read())


class _Reader:
    """Reads an expression from left to right."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where, self._depth = text, where, 0
        self._tokens = self._tokenise()

    def read(self) -> _Test:
        test = self._any()
        if self._next.kind != "end":
            raise self._expected("'and', 'or' or the end")
        return test

    def _tokenise(self) -> list[_Token]:
        tokens, column, end = [], 0, len(self._text.rstrip())
        while column < end:
            part = _TOKEN.match(self._text, column)
            if part is None:
                begin = len(self._text) - len(self._text[column:].lstrip())
                what = "a closing quote" if self._text[begin] in "'\"" else "a word, an axis or a comparison"
                raise self._fault(f"expected {what}, got {self._text[begin:]!r}", begin)
            kind = str(part.lastgroup)
            tokens.append(_Token("text" if kind in ("single", "double") else kind, part[kind], part.start(kind)))
            column = part.end()
        return [_Token("end", "", end), *reversed(tokens)]

    @property
    def _next(self) -> _Token:
        return self._tokens[-1]

    def _take(self, kind: str, *texts: str) -> str:
        """Take the next token if it is one of these, and return its text; empty if it is another."""
        return self._tokens.pop().text if self._next.is_one(kind, *texts) else ""

    def _any(self) -> _Test:
        return self._chain("or", self._all, any)

    def _all(self) -> _Test:
        return self._chain("and", self._negation, all)

    def _chain(self, word: str, operand: Callable[[], _Test], holds: Callable[[Iterable[bool]], bool]) -> _Test:
        tests = [operand()]
        while self._take("word", word):
            tests.append(operand())
        return tests[0] if len(tests) == 1 else lambda *case: holds(test(*case) for test in tests)

    def _negation(self) -> _Test:
        self._depth += 1
        if self._depth > _MAX_DEEP:
            raise self._fault(f"expected at most {_MAX_DEEP} levels of parentheses and 'not'", self._next.column)
        if self._take("word", "not"):
            operand = self._negation()
            test: _Test = lambda *case: not operand(*case)  # noqa: E731
        else:
            test = self._single()
        self._depth -= 1
        return test

    def _single(self) -> _Test:
        if self._take("sign", "("):
            test = self._any()
            if not self._take("sign", ")"):
                raise self._expected("')'")
            return test
        if self._next.kind not in ("word", "text") or self._next.is_one("word", *_CONNECTIVES):
            raise self._expected("a word, an axis or '('")
        token = self._tokens.pop()
        if token.kind == "word" and self._next.is_one("sign", "%", *_SIGNS):
            return self._comparison(token)
        if not token.text:
            raise self._fault("expected a text between the quotes", token.column)
        word = token.text.lower()
        return lambda texts, _: any(word in text for text in texts)

    def _comparison(self, left: _Token) -> _Test:
        axis = self._axis(left)
        divisor = self._number("a whole number larger than 0", 1) if self._take("sign", "%") else 0
        holds = _SIGNS.get(self._take("sign", *_SIGNS))
        if holds is None:
            raise self._expected("=, !=, <, <=, > or >=")
        right = self._next
        if right.kind == "word" and right.text[0].isalpha() and right.text not in _CONNECTIVES:
            right_axis = self._axis(self._tokens.pop())
            return lambda _, lengths: (
                {axis, right_axis} <= lengths.keys() and holds(_remainder(lengths[axis], divisor), lengths[right_axis])
            )
        number = self._number("a whole number or an axis", 0)
        return lambda _, lengths: axis in lengths and holds(_remainder(lengths[axis], divisor), number)

    def _axis(self, token: _Token) -> str:
        if not token.text[0].isalpha():
            raise self._fault(f"expected an axis on the left of a comparison, got {token.text!r}", token.column)
        if token.text not in AXES:
            raise self._fault(f"unknown axis {token.text!r}; expected one of {', '.join(AXES)}", token.column)
        return token.text

    def _number(self, what: str, least: int) -> int:
        token = self._next
        if token.kind != "word" or not _NUMBER.fullmatch(token.text) or int(token.text) < least:
            raise self._expected(what)
        return int(self._tokens.pop().text)

    def _expected(self, what: str) -> UsageError:
        got = "the end" if self._next.kind == "end" else repr(self._next.text)
        return self._fault(f"expected {what}, got {got}", self._next.column)

    def _fault(self, message: str, column: int) -> UsageError:
        """Return an error that points at the fault, if the text can be shown on a line."""
        pointed = f"\n  {self._text}\n  {' ' * column}^" if self._text.isprintable() else f" (column {column + 1})"
        return UsageError(f"{self._where}: {message}{pointed}")


def _remainder(length: int, divisor: int) -> int:
    return length % divisor if divisor else length
