"""YAML read as plain data, with the line of every field; no tags, no code, no surprises in size.

ruamel.yaml's safe loader keeps no lines and its round-trip loader lets tags through, so the events and nodes are read
here, and only YAML's own plain types are built from them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_BYTES = 4 * 2**20
MAX_NODES = 100_000
"""Enough for tens of thousands of typed numbers; larger arrays are drawn, not typed."""
MAX_DEPTH = 100

FieldPath = tuple[str | int, ...]

_SCALARS = YAML(typ="safe", pure=True).constructor


class YamlFault(Exception):
    """A file that is not acceptable YAML: what is wrong, and on which line."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class YamlDocument:
    """Plain data, and the line on which each field starts."""

    data: Any
    lines: dict[FieldPath, int]

    def locate(self, path: FieldPath) -> tuple[FieldPath, int | None]:
        """Return the longest part of a path that exists in the file, and its line.

        Parts that the file does not have (a validator's own labels, a missing field) are passed over.
        """
        found: FieldPath = ()
        for part in path:
            if (*found, part) in self.lines:
                found = (*found, part)
        return found, self.lines.get(found)


def read_yaml(path: Path) -> YamlDocument:
    """Read one YAML file. Raises ``YamlFault``; never runs code and never reads anything else."""
    text = _read_text(path)
    try:
        _reject_tags(text)
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "cannot be parsed"
        raise YamlFault(f"not valid YAML: {problem}", mark.line + 1 if mark else None) from None
    except YAMLError as error:
        raise YamlFault(f"not valid YAML: {' '.join(str(error).split())}") from None
    except (RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise YamlFault(f"not valid YAML: {reason}") from None
    if root is None:
        raise YamlFault("the file is empty; expected a title, a source, an operation and a list of cases", 1)
    _check_size(root)
    lines: dict[FieldPath, int] = {}
    data = _build(root, (), lines)
    return YamlDocument(data, lines)


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise YamlFault(
                f"{size} bytes; a case file has {MAX_BYTES} at most, draw large arrays instead of typing them"
            )
        content = path.read_bytes()
    except OSError as error:
        raise YamlFault(f"cannot be read: {error.strerror}") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise YamlFault(f"not UTF-8: byte 0x{content[error.start]:02x} at position {error.start}", line) from None


def _reject_tags(text: str) -> None:
    for event in YAML(typ="safe", pure=True).parse(text):
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise YamlFault(
                f"the tag {tag} is not allowed: a case is plain data, nothing is built from it",
                event.start_mark.line + 1,
            )


def _check_size(root: Node) -> None:
    """Count the nodes as aliases expand them, before anything is expanded."""
    counts: dict[int, int] = {}
    open_nodes: set[int] = set()

    def count(node: Node, depth: int) -> int:
        identity = id(node)
        if identity in counts:
            return counts[identity]
        if identity in open_nodes:
            raise YamlFault("an alias refers to a node that contains it", node.start_mark.line + 1)
        if depth > MAX_DEPTH:
            raise YamlFault(f"nested more than {MAX_DEPTH} levels deep", node.start_mark.line + 1)
        open_nodes.add(identity)
        total = 1 + sum(count(child, depth + 1) for child in _children(node))
        open_nodes.discard(identity)
        if total > MAX_NODES:
            raise YamlFault(
                f"more than {MAX_NODES} values (aliases expanded); draw large arrays instead of typing them",
                node.start_mark.line + 1,
            )
        counts[identity] = total
        return total

    count(root, 0)


def _children(node: Node) -> Iterator[Node]:
    if isinstance(node, SequenceNode):
        yield from node.value
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            yield key
            yield value


def _build(node: Node, path: FieldPath, lines: dict[FieldPath, int]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, SequenceNode):
        return [_build(child, (*path, index), lines) for index, child in enumerate(node.value)]
    if isinstance(node, MappingNode):
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = _build_scalar(key_node)
            if not isinstance(key, str):
                raise YamlFault(f"expected a field name, got {key!r}", line)
            if key in mapping:
                raise YamlFault(f"the field {key!r} is given twice", line)
            lines[(*path, key)] = line
            mapping[key] = _build(value_node, (*path, key), lines)
        return mapping
    return _build_scalar(node)


def _build_scalar(node: Node) -> Any:
    """Build a number, text, boolean or nothing, by YAML 1.2's rules."""
    if not isinstance(node, ScalarNode):
        raise YamlFault("expected a field name, got a collection", node.start_mark.line + 1)
    name = node.tag.rsplit(":", 1)[-1]
    try:
        if name == "int":
            return _SCALARS.construct_yaml_int(node)
        if name == "float":
            return _SCALARS.construct_yaml_float(node)
    except ValueError:
        raise YamlFault(f"{node.value[:40]!r} is not a number that can be read", node.start_mark.line + 1) from None
    if name == "bool":
        return _SCALARS.construct_yaml_bool(node)
    if name == "null":
        return None
    # Whatever else the resolver knows (a date, a merge key) is text to us.
    return node.value
