"""Expressions that select cases: words in their names and tags, and comparisons of their shapes.

    Lk>64 and not causal
    (softcap or window) and Lq!=Lk
    Lk%8!=0 and 'equal keys'

A word matches a case where its id, its name or one of its tags has the word in it, whatever the case of the letters. A
text in quotes is one word, and may hold blanks. A comparison has the letter of an axis on its left, and a whole number
or another axis on its right; ``Lk%8`` is the remainder. It does not match a case that has no such axis. ``not`` binds
closer than ``and``, and ``and`` closer than ``or``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attncheck.errors import UsageError
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


@dataclass(frozen=True)
class _Subject:
    """What an expression is compared with: the texts of a case in small letters, and the lengths of its axes."""

    texts: tuple[str, ...]
    lengths: Mapping[str, int]


_Test = Callable[[_Subject], bool]


@dataclass(frozen=True)
class Expression:
    """An expression that was read."""

    text: str
    _test: _Test

    def matches(self, case: Case) -> bool:
        """Whether it selects a case."""
        texts = (case.id, case.name, *case.tags)
        lengths = axis_lengths(case.operation, case.options, case.input_shapes)
        return self._test(_Subject(tuple(text.lower() for text in texts), lengths))


@dataclass(frozen=True)
class _Token:
    """A part of the text: a ``sign``, a ``word``, a ``text`` in quotes, or the ``end``."""

    kind: str
    text: str
    column: int

    @property
    def shown(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text)


def read_expression(text: str, where: str) -> Expression:
    """Read an expression. Raises ``UsageError``, which names ``where`` it stands and points at the fault."""
    return Expression(text, _Reader(text, where).read())


class _Reader:
    """Reads an expression from left to right."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where, self._index, self._depth = text, where, 0, 0
        if len(text) > _MAX_LETTERS:
            raise UsageError(f"{where}: expected at most {_MAX_LETTERS} characters, got {len(text)}")
        self._tokens = self._tokenise()

    def read(self) -> _Test:
        test = self._any()
        if self._token.kind != "end":
            raise self._expected("'and', 'or' or the end")
        return test

    def _tokenise(self) -> list[_Token]:
        tokens, column, end = [], 0, len(self._text.rstrip())
        while column < end:
            found = _TOKEN.match(self._text, column)
            if found is None:
                begin = len(self._text) - len(self._text[column:].lstrip())
                what = "a closing quote" if self._text[begin] in "'\"" else "a word, an axis or a comparison"
                raise self._fault(f"expected {what}, got {self._text[begin:]!r}", begin)
            kind = str(found.lastgroup)
            tokens.append(_Token("text" if kind in ("single", "double") else kind, found[kind], found.start(kind)))
            column = found.end()
        return [*tokens, _Token("end", "", end)]

    @property
    def _token(self) -> _Token:
        return self._tokens[self._index]

    def _take(self) -> _Token:
        token = self._token
        self._index += 1
        return token

    def _is(self, kind: str, *texts: str) -> bool:
        return self._token.kind == kind and self._token.text in texts

    def _any(self) -> _Test:
        tests = [self._all()]
        while self._is("word", "or"):
            self._take()
            tests.append(self._all())
        return tests[0] if len(tests) == 1 else lambda subject: any(test(subject) for test in tests)

    def _all(self) -> _Test:
        tests = [self._negated()]
        while self._is("word", "and"):
            self._take()
            tests.append(self._negated())
        return tests[0] if len(tests) == 1 else lambda subject: all(test(subject) for test in tests)

    def _negated(self) -> _Test:
        self._depth += 1
        if self._depth > _MAX_DEEP:
            raise self._fault(f"expected at most {_MAX_DEEP} levels of parentheses and 'not'", self._token.column)
        try:
            if not self._is("word", "not"):
                return self._single()
            self._take()
            test = self._negated()
            return lambda subject: not test(subject)
        finally:
            self._depth -= 1

    def _single(self) -> _Test:
        if self._is("sign", "("):
            self._take()
            test = self._any()
            if not self._is("sign", ")"):
                raise self._expected("')'")
            self._take()
            return test
        if self._token.kind not in ("word", "text") or self._is("word", *_CONNECTIVES):
            raise self._expected("a word, an axis or '('")
        token = self._take()
        if token.kind == "word" and self._is("sign", "%", *_SIGNS):
            return self._comparison(token)
        if not token.text:
            raise self._fault("expected a text between the quotes", token.column)
        word = token.text.lower()
        return lambda subject: any(word in text for text in subject.texts)

    def _comparison(self, left: _Token) -> _Test:
        axis, divisor = self._axis(left), 0
        if self._is("sign", "%"):
            self._take()
            divisor = self._number("a whole number larger than 0", 1)
        if not self._is("sign", *_SIGNS):
            raise self._expected("=, !=, <, <=, > or >=")
        holds = _SIGNS[self._take().text]
        right = self._token
        if right.kind == "word" and right.text[0].isalpha() and right.text not in _CONNECTIVES:
            other = self._axis(self._take())
            return lambda subject: (
                {axis, other} <= subject.lengths.keys()
                and holds(_remainder(subject.lengths[axis], divisor), subject.lengths[other])
            )
        number = self._number("a whole number or an axis", 0)
        return lambda subject: axis in subject.lengths and holds(_remainder(subject.lengths[axis], divisor), number)

    def _axis(self, token: _Token) -> str:
        if not token.text[0].isalpha():
            raise self._fault(f"expected an axis on the left of a comparison, got {token.text!r}", token.column)
        if token.text not in AXES:
            raise self._fault(f"unknown axis {token.text!r}; expected one of {', '.join(AXES)}", token.column)
        return token.text

    def _number(self, what: str, least: int) -> int:
        token = self._token
        if token.kind != "word" or not _NUMBER.fullmatch(token.text) or int(token.text) < least:
            raise self._expected(what)
        return int(self._take().text)

    def _expected(self, what: str) -> UsageError:
        return self._fault(f"expected {what}, got {self._token.shown}", self._token.column)

    def _fault(self, message: str, column: int) -> UsageError:
        """Say what is wrong, and point at it, where the text can be shown on a line."""
        pointed = f"\n  {self._text}\n  {' ' * column}^" if self._text.isprintable() else f" (column {column + 1})"
        return UsageError(f"{self._where}: {message}{pointed}")


def _remainder(length: int, divisor: int) -> int:
    return length % divisor if divisor else length
