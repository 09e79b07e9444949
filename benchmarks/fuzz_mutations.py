"""Hostile files for the fuzzing campaign: good ones with something broken, and ones that only a grammar would write.

Every function draws from a ``random.Random`` that it is given, so that a file follows from a seed and a number alone.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import ComposerError

SCALARS: tuple[str, ...] = (
    *(
        "",
        "~",
        "null",
        "true",
        "NO",
        "0",
        "-0",
        "-1",
        "1",
        "2",
        "1.5",
        "1e400",
        "1e-400",
        ".inf",
        "-.INF",
        ".nan",
        "1:30",
    ),
    *("1_000", "0o777", "0b1", "4294967295", "4294967296", "9223372036854775807", "9223372036854775808", "67108865"),
    *("1.7976931348623157e308", "5e-324", "2024-01-01", "1e99999999999999999999", "9" * 30, "9" * 309, "9" * 5000),
    *("-" + "9" * 400, "0x" + "f" * 300, "0." + "1" * 5000, "1" * 3000 + "x", "1e" + "9" * 30, "<<", "=", "@", "`"),
    *("!!python/object/apply:os.system [x]", "!!binary aGk=", "!x y", "!", "*a", "&a 1", "&a [*a]", "&a {a: *a}"),
    *("'", '"', '"\\ud800"', '"\\UFFFFFFFF"', '"\\0"', '"\\x1b[31m"', '"\\r\\n::error::x"', "[]", "{}", "[[]]"),
    *("[1, [2]]", "{a: 1}", "? x", "|\n  x", "- x", "# x", "%YAML 1.1", "---", "...", "日本", "\u202e", "\ufeff"),
    *("\U0001f600", "\u2028", "\x85", "ß", "x" * 300, "x" * 5000, "日" * 200, "<script>alert(1)</script>", "]]>"),
    *("=cmd|'/c calc'!A1", "../../../etc/passwd", "/dev/zero", "con", "[red]x[/red]", "a|b`c", "[" * 150, "{a: " * 120),
)
"""What stands where a value should: as it would be written."""
BYTES: tuple[bytes, ...] = (
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\xaf", b"\x1b[31m", b"\r", b"\t", b"\n\n"),
    *(
        b": ",
        b"- ",
        b"? ",
        b"&a ",
        b"*a",
        b"<<: *a\n",
        b"!!",
        b"%TAG ! x\n",
        b"---\n",
        b"...\n",
        b"#",
        b"|",
        b">",
        b"'",
    ),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 10**30, -(10**300), 10**400, 1.5, -0.0),
    *(1e-320, 1e308, -1e300, float("inf"), float("-inf"), float("nan"), "", "x", "1", ".", "1 2", "0.5 0.5\n1 1"),
    *("inf nan", "=1+1", "<b>", "\u202e", "\0", "\x1b[2J", "日" * 200, "x" * 4001, [], {}, [[]], [1], [1, 2], [0, 0]),
    *(
        [1, "x"],
        [[1], [1, 2]],
        [None, None],
        {"x": 1},
        {"": None},
        [[[[[[1]]]]]],
        {"values": 1},
        {"ref": "a"},
        {"each": "a"},
        {"each": 1},
    ),
)
"""What stands in a field of another type."""
_TOKEN = re.compile(rb"(?<=[ \[{:,])[-\w.]+(?=[ \]},:\n])")
_MAX_LENGTH, _MAX_OF_FEW, _FEW = 1 << 13, 1 << 20, 0.005
"""Bytes of a file, and of the few that test the limits of size."""

Random = random.Random


def case_texts() -> list[bytes]:
    """Return every bundled case as a file of its own, as it is written, and the bundled files themselves."""
    root = Path(str(files("attncheck.cases")))
    whole = [path.read_bytes() for path in sorted(root.rglob("*.yaml")) if path.name != "tags.yaml"]
    single = []
    for text in whole:
        head, mark, rest = text.partition(b"\ncases:\n")
        entries = re.split(rb"(?m)^(?=  - name:)", rest)
        single += [head + mark + entry for entry in entries if entry.startswith(b"  - name:")]
    return [*single, *single, *whole]


def expected_failure_texts() -> list[bytes]:
    """Return the bundled lists of expected failures, each list and each entry by itself."""
    root = Path(str(files("attncheck.backends"))) / "expected_failures"
    whole = [path.read_bytes() for path in sorted(root.glob("*.yaml"))]
    entries = [entry for text in whole for entry in re.split(rb"(?m)^(?=- )", text) if entry.startswith(b"- ")]
    return [*entries, *whole]


def as_data(texts: Iterable[bytes]) -> list[Any]:
    """Read good files as plain data, but for a case that stands by itself and takes an anchor of another."""
    found = []
    for text in texts:
        with suppress(ComposerError):
            found.append(YAML(typ="safe", pure=True).load(text))
    return found


def mutate(texts: Sequence[bytes], data: Sequence[Any], draw: Random) -> bytes:
    """Return one of the texts, or the text of some of the data, with one to four things changed."""
    most = _MAX_OF_FEW if draw.random() < _FEW else _MAX_LENGTH
    if draw.random() < 0.4:
        changed = copy.deepcopy(draw.choice(data))
        for _ in range(draw.choice((1, 1, 2, 3))):
            changed = change_data(changed, draw)
        text = emit(changed, draw).encode("utf-8", "surrogatepass")
        return (change_bytes(text, texts, draw) if draw.random() < 0.1 else text)[:most]
    text = draw.choice(texts)
    for _ in range(draw.choice((1, 1, 2, 4))):
        text = change_bytes(text, texts, draw)[:most]
    return text


def change_bytes(text: bytes, texts: Sequence[bytes], draw: Random) -> bytes:
    """Change a text in one of many ways."""
    return draw.choice(_CHANGES)(text, texts, draw)


def _span(text: bytes, draw: Random) -> tuple[int, int]:
    start = draw.randrange(len(text) + 1)
    return start, min(len(text), start + draw.choice((1, 1, 2, 5, 20, 100)))


def _flip(text: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    changed = bytearray(text or b"x")
    for _each in range(draw.choice((1, 1, 3))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _truncate(text: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    return text[: draw.randrange(len(text) + 1)]


def _delete(text: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    start, end = _span(text, draw)
    return text[:start] + text[end:]


def _repeat(text: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    start, end = _span(text, draw)
    return text[:end] + text[start:end] * draw.choice((1, 1, 2, 2, 5, 5, 10, 200)) + text[end:]


def _insert(text: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    start, _end = _span(text, draw)
    return text[:start] + draw.choice(BYTES) * draw.choice((1, 1, 1, 200)) + text[start:]


def _splice(text: bytes, texts: Sequence[bytes], draw: Random) -> bytes:
    other = draw.choice(texts)
    return text[: draw.randrange(len(text) + 1)] + other[draw.randrange(len(other) + 1) :]


def _lines(text: bytes, texts: Sequence[bytes], draw: Random) -> bytes:
    """Swap, double, indent or replace a line: fields given twice, in the wrong place, at the wrong depth."""
    lines = text.splitlines(keepends=True) or [b"\n"]
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(5):
        case 0:
            lines[one], lines[other] = lines[other], lines[one]
        case 1:
            lines.insert(other, lines[one])
        case 2:
            lines[one] = b" " * draw.randrange(1, 5) + lines[one]
        case 3:
            lines[one] = lines[one].lstrip(b" ")
        case 4:
            lines[one] = draw.choice(draw.choice(texts).splitlines(keepends=True))
    return b"".join(lines)


def _token(text: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    """Put something hostile in the place of a name or a value."""
    tokens = list(_TOKEN.finditer(text))
    if not tokens:
        return draw.choice(SCALARS).encode()
    start, end = draw.choice(tokens).span()
    return text[:start] + draw.choice(SCALARS).encode() + text[end:]


def _anchors(text: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    """Put an anchor before one value and its alias, or a merge key, in the place of another."""
    tokens = [match.span() for match in _TOKEN.finditer(text)]
    if len(tokens) < 2:
        return b"&a " + text
    (start, _end), (other, end) = sorted(draw.sample(tokens, 2))
    return text[:start] + b"&a " + text[start:other] + draw.choice((b"*a", b"<<: *a", b"[*a, *a]")) + text[end:]


_CHANGES: tuple[Callable[[bytes, Sequence[bytes], Random], bytes], ...] = (
    *(_flip, _truncate, _delete, _repeat, _insert, _splice, _lines, _lines, _token, _token, _token, _token, _anchors),
)


def change_data(data: Any, draw: Random) -> Any:
    """Replace, remove, add, double, move or deepen something anywhere in plain data."""
    found = slots(data)
    if not found:
        return draw.choice(VALUES)
    container, key = draw.choice(found)
    match draw.randrange(8):
        case 0 | 1 | 2:
            container[key] = copy.deepcopy(draw.choice(VALUES))
        case 3:
            del container[key]
        case 4:
            other, place = draw.choice(found)
            container[key] = copy.deepcopy(other[place])
        case 5 if isinstance(container, dict):
            container[draw.choice(("x", "name", "values", "", "日", "ref", "draw"))] = copy.deepcopy(
                draw.choice(VALUES)
            )
        case 6:
            for _ in range(draw.choice((1, 2, 60, 200))):
                container[key] = draw.choice(([container[key]], {"concat": [container[key]], "axis": 0}))
        case _ if isinstance(container[key], list):
            container[key] = container[key] * draw.choice((0, 0, 2, 2, 2, 20, 20, 2000))
            container[key] = container[key][:20_000]
    return data


def slots(data: Any) -> list[tuple[Any, Any]]:
    """Return every place inside of some data: what holds it, and its key there."""
    found: list[tuple[Any, Any]] = []
    left = [data]
    while left:
        container = left.pop()
        if not isinstance(container, dict | list):
            continue
        entries = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in entries:
            found.append((container, key))
            if isinstance(value, dict | list):
                left.append(value)
    return found


def emit(data: Any, draw: Random | None = None) -> str:
    """Write plain data as YAML on one line, here and there as it should not be: fields twice, tags, merge keys."""
    odd = "" if draw is None or draw.random() > 0.0003 else draw.choice(("!!str ", "&a ", "!x ", "!!float "))
    match data:
        case dict():
            fields = [f"{_quoted(str(name))}: {emit(value, draw)}" for name, value in data.items()]
            if draw is not None and fields and draw.random() < 0.002:
                fields.append(draw.choice((draw.choice(fields), "<<: {x: 1}", "? [1]\n: 2", "1: 2", "~: 1")))
            return f"{odd}{{{', '.join(fields)}}}"
        case list():
            return f"{odd}[{', '.join(emit(value, draw) for value in data)}]"
        case str():
            return odd + _quoted(data)
        case None | bool():
            return odd + {None: "null", True: "true", False: "false"}[data]
        case int():
            return f"{odd}{data}"
    return odd + {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(float(data)), repr(float(data)))


def _quoted(text: str) -> str:
    escaped = "".join(
        character if character.isalnum() or character in " ._-/=<>+|" else f"\\U{ord(character):08x}"
        for character in text
    )
    return f'"{escaped}"'
