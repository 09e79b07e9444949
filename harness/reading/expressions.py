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
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_WHOLE_NUMBER = re.compile(r"[0-9]{1,12}")
# Each level takes six frames of the parser: 300 of the 1,000 frames that Python allows.
_MAX_NESTING = 50
# A choice: a longer expression is a mistake; a larger number would also make its error message longer.
_MAX_CHARACTERS = 1000
_CONNECTIVES = ("and", "or", "not")

_CaseTest = Callable[[tuple[str, ...], Mapping[str, int]], bool]
"""Takes the texts of a case in small letters, and the lengths of its axes."""


@dataclass(frozen=True)
class Expression:
    """An expression that was read."""

    text: str
    _test: _CaseTest

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

    def matches(self, kind: str, *texts: str) -> bool:
        return self.kind == kind and self.text in texts


def parse_expression(text: str, where: str) -> Expression:
    """Read an expression. Raises ``UsageError``, which names the place ``where`` and points at the fault."""
    if len(text) > _MAX_CHARACTERS:
        raise UsageError(f"{where}: expected at most {_MAX_CHARACTERS} characters, got {len(text)}")
    return Expression(text, _ExpressionParser(text, where).parse())


class _ExpressionParser:
    """Reads an expression from left to right."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where, self._depth = text, where, 0
        self._tokens = self._tokenise()

    def parse(self) -> _CaseTest:
        test = self._parse_or()
        if self._next_token.kind != "end":
            raise self._unexpected_token_error("'and', 'or' or the end")
        return test

    def _tokenise(self) -> list[_Token]:
        tokens, column, end = [], 0, len(self._text.rstrip())
        while column < end:
            part = _TOKEN.match(self._text, column)
            if part is None:
                begin = len(self._text) - len(self._text[column:].lstrip())
                what = "a closing quote" if self._text[begin] in "'\"" else "a word, an axis or a comparison"
                raise self._error_at(f"expected {what}, got {self._text[begin:]!r}", begin)
            kind = str(part.lastgroup)
            tokens.append(_Token("text" if kind in ("single", "double") else kind, part[kind], part.start(kind)))
            column = part.end()
        return [_Token("end", "", end), *reversed(tokens)]

    @property
    def _next_token(self) -> _Token:
        return self._tokens[-1]

    def _pop_if(self, kind: str, *texts: str) -> str:
        """Take the next token if it is one of these, and return its text; empty if it is another."""
        return self._tokens.pop().text if self._next_token.matches(kind, *texts) else ""

    def _parse_or(self) -> _CaseTest:
        return self._parse_chain("or", self._parse_and, any)

    def _parse_and(self) -> _CaseTest:
        return self._parse_chain("and", self._parse_not, all)

    def _parse_chain(
        self, word: str, operand: Callable[[], _CaseTest], holds: Callable[[Iterable[bool]], bool]
    ) -> _CaseTest:
        tests = [operand()]
        while self._pop_if("word", word):
            tests.append(operand())
        return tests[0] if len(tests) == 1 else lambda *case: holds(test(*case) for test in tests)

    def _parse_not(self) -> _CaseTest:
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise self._error_at(
                f"expected at most {_MAX_NESTING} levels of parentheses and 'not'", self._next_token.column
            )
        if self._pop_if("word", "not"):
            operand = self._parse_not()
            test: _CaseTest = lambda *case: not operand(*case)  # noqa: E731
        else:
            test = self._parse_operand()
        self._depth -= 1
        return test

    def _parse_operand(self) -> _CaseTest:
        if self._pop_if("sign", "("):
            test = self._parse_or()
            if not self._pop_if("sign", ")"):
                raise self._unexpected_token_error("')'")
            return test
        if self._next_token.kind not in ("word", "text") or self._next_token.matches("word", *_CONNECTIVES):
            raise self._unexpected_token_error("a word, an axis or '('")
        token = self._tokens.pop()
        if token.kind == "word" and self._next_token.matches("sign", "%", *_COMPARISONS):
            return self._parse_comparison(token)
        if not token.text:
            raise self._error_at("expected a text between the quotes", token.column)
        word = token.text.lower()
        return lambda texts, _: any(word in text for text in texts)

    def _parse_comparison(self, left: _Token) -> _CaseTest:
        axis = self._require_axis(left)
        divisor = self._pop_number("a whole number larger than 0", 1) if self._pop_if("sign", "%") else 0
        holds = _COMPARISONS.get(self._pop_if("sign", *_COMPARISONS))
        if holds is None:
            raise self._unexpected_token_error("=, !=, <, <=, > or >=")
        right = self._next_token
        if right.kind == "word" and right.text[0].isalpha() and right.text not in _CONNECTIVES:
            right_axis = self._require_axis(self._tokens.pop())
            return lambda _, lengths: (
                {axis, right_axis} <= lengths.keys() and holds(_remainder(lengths[axis], divisor), lengths[right_axis])
            )
        number = self._pop_number("a whole number or an axis", 0)
        return lambda _, lengths: axis in lengths and holds(_remainder(lengths[axis], divisor), number)

    def _require_axis(self, token: _Token) -> str:
        if not token.text[0].isalpha():
            raise self._error_at(f"expected an axis on the left of a comparison, got {token.text!r}", token.column)
        if token.text not in AXES:
            raise self._error_at(f"unknown axis {token.text!r}; expected one of {', '.join(AXES)}", token.column)
        return token.text

    def _pop_number(self, what: str, least: int) -> int:
        token = self._next_token
        if token.kind != "word" or not _WHOLE_NUMBER.fullmatch(token.text) or int(token.text) < least:
            raise self._unexpected_token_error(what)
        return int(self._tokens.pop().text)

    def _unexpected_token_error(self, what: str) -> UsageError:
        got = "the end" if self._next_token.kind == "end" else repr(self._next_token.text)
        return self._error_at(f"expected {what}, got {got}", self._next_token.column)

    def _error_at(self, message: str, column: int) -> UsageError:
        """Return an error that points at the fault, if the text can be shown on a line."""
        pointed = f"\n  {self._text}\n  {' ' * column}^" if self._text.isprintable() else f" (column {column + 1})"
        return UsageError(f"{self._where}: {message}{pointed}")


def _remainder(length: int, divisor: int) -> int:
    return length % divisor if divisor else length
