"""YAML's scalars as plain numbers, texts and booleans, by YAML 1.2's rules; what float64 cannot hold is refused."""

from __future__ import annotations

import math
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import Node, ScalarNode

FieldPath = tuple[str | int, ...]

_MAX_SHOWN = 40
"""Characters of a number in a message."""
_AS_TEXT = frozenset({"printed", "known"})
"""Fields whose numbers stand in quotes, because a document may print what float64 cannot hold."""

_SCALARS = YAML(typ="safe", pure=True).constructor


class YamlFault(Exception):
    """A file that is not acceptable YAML: what is wrong, on which line and, once the file has fields, at which.

    Where single fields are at fault, ``data`` is the rest of the file, which names the case, and ``others`` are the
    faults of further fields.
    """

    def __init__(self, message: str, line: int | None = None, path: FieldPath = ()) -> None:
        super().__init__(message)
        self.line = line
        self.path = path
        self.data: Any = None
        self.others: tuple[YamlFault, ...] = ()


def build_key(node: Node, path: FieldPath) -> str:
    """Build the name of a field. Raises ``YamlFault`` for any other key."""
    key = build_scalar(node, path) if isinstance(node, ScalarNode) else "a collection"
    if not isinstance(node, ScalarNode) or not isinstance(key, str):
        shown = key if isinstance(key, str) else node.value[:40] or "nothing"
        raise YamlFault(f"expected the name of a field, got {shown}", node.start_mark.line + 1, path)
    return key


def build_scalar(node: ScalarNode, path: FieldPath) -> Any:
    """Build a number, text, boolean or nothing. Raises ``YamlFault`` for one that none of these can hold."""
    name = str(node.tag).rsplit(":", 1)[-1]
    if name in ("int", "float"):
        return _build_number(node, name, path)
    if name == "bool":
        return _SCALARS.construct_yaml_bool(node)
    if name == "null":
        return None
    if not node.value.isascii() and any("\ud800" <= character <= "\udfff" for character in node.value):
        raise YamlFault("half a surrogate pair is not a character", node.start_mark.line + 1, path)
    # Whatever else the resolver knows (a date, a merge key) is text to us.
    return node.value


def _build_number(node: ScalarNode, name: str, path: FieldPath) -> int | float:
    """Build a number that float64 can hold; one that it turns into zero or infinity is refused."""
    text = node.value if len(node.value) <= _MAX_SHOWN else f"{node.value[: _MAX_SHOWN - 3]}..."
    try:
        number: int | float = getattr(_SCALARS, f"construct_yaml_{name}")(node)
        beyond = math.isinf(float(number)) and "inf" not in node.value.lower()
    except (OverflowError, ValueError):  # the latter of thousands of digits
        beyond = True
    lost = not beyond and number == 0 and any(digit in "123456789" for digit in node.value.lower().split("e")[0])
    if not (beyond or lost):
        return number
    if _AS_TEXT & set(path):
        message = f"expected text in quotes, got {text}: a bare number would lose its digits"
    elif beyond:
        message = f"{text!r} is beyond the range of float64"
    else:
        message = f"{text!r} is too small for float64, which would read it as 0"
    raise YamlFault(message, node.start_mark.line + 1, path)
