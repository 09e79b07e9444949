"""YAML read as plain data, with the line of every field; no tags, no code, no surprises in size.

ruamel.yaml's safe loader keeps no lines and its round-trip loader lets tags through, so the events and nodes are read
here, and only YAML's own plain types are built from them, by YAML 1.2's rules; what float64 cannot hold is refused.

Most files are composed by libyaml, whose scanner, in C, takes a thirtieth of the time, but reads YAML 1.1 and words its
errors otherwise. So it reads ordinary files alone: of a file that either could read in another way, that one of them
refuses, or that a case may not be, it returns nothing, and ruamel.yaml says what is to be said. Scalars are resolved by
ruamel.yaml in both.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent, NodeEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.parser import Parser
from ruamel.yaml.reader import ReaderError

FieldPath = tuple[str | int, ...]

_MAX_SHOWN = 40
"""Characters of a number in a message."""
_TEXT_FIELDS = frozenset({"printed", "known"})
"""Fields whose numbers stand in quotes, because a document may print what float64 cannot hold."""

_SCALAR_CONSTRUCTOR = YAML(typ="safe", pure=True).constructor


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
        return _SCALAR_CONSTRUCTOR.construct_yaml_bool(node)
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
        number: int | float = getattr(_SCALAR_CONSTRUCTOR, f"construct_yaml_{name}")(node)
        beyond = math.isinf(float(number)) and "inf" not in node.value.lower()
    except (OverflowError, ValueError):  # the latter of thousands of digits
        beyond = True
    lost = not beyond and number == 0 and any(digit in "123456789" for digit in node.value.lower().split("e")[0])
    if not (beyond or lost):
        return number
    if _TEXT_FIELDS & set(path):
        message = f"expected text in quotes, got {text}: a bare number would lose its digits"
    elif beyond:
        message = f"{text!r} is beyond the range of float64"
    else:
        message = f"{text!r} is too small for float64, which would read it as 0"
    raise YamlFault(message, node.start_mark.line + 1, path)


_RESOLVER = YAML(typ="safe", pure=True).resolver
_resolve_scalar_tag = lru_cache(maxsize=4096)(partial(_RESOLVER.resolve, ScalarNode))
"""The tag of a scalar, by its text and whether it stands in quotes: files say the same words again and again."""

_PATTERNS_FOR_SLOW_READER = re.compile(
    "|".join(
        (
            "[^\\S \\n]|[\x85\u2028\u2029\ufeff]",  # other blanks and line breaks, a byte order mark
            "^%",  # a directive
            r"[&*][^\s\[\]{},]*[^\s\[\]{},\w-]",  # names of anchors and aliases that YAML 1.1 does not have
            r"[\"']:\S",  # a value that follows its quoted name at once
        )
    ),
    re.MULTILINE,
)


class _NeedsSlowReader(Exception):
    """The text is for the slow reader."""


def compose_with_libyaml(text: str, max_nodes: int, max_depth: int) -> Node | None:
    """Return the root of a text, or None if the slow reader has to read it: without a document, too."""
    if not hasattr(yaml, "CSafeLoader") or _PATTERNS_FOR_SLOW_READER.search(text):
        return None
    try:
        return _NodeComposer(yaml.parse(text, Loader=yaml.CSafeLoader), max_nodes, max_depth).compose_document()
    except (_NeedsSlowReader, yaml.YAMLError, ValueError, OverflowError):
        return None


class _NodeComposer:
    """Makes nodes of events: as many, and as deep, as a case may have."""

    def __init__(self, events: Iterator[Any], max_nodes: int, max_depth: int) -> None:
        self._events = events
        self._nodes_left, self._max_depth = max_nodes, max_depth
        self._anchors: dict[str, Node] = {}

    def compose_document(self) -> Node:
        """Compose the only document of the text."""
        self._next_event(yaml.StreamStartEvent)
        start = self._next_event(yaml.DocumentStartEvent)
        if start.version is not None or start.tags:
            raise _NeedsSlowReader
        root = self._compose_node(next(self._events), 0)
        self._next_event(yaml.DocumentEndEvent)
        self._next_event(yaml.StreamEndEvent)
        return root

    def _next_event(self, kind: type) -> Any:
        event = next(self._events, None)
        if not isinstance(event, kind):
            raise _NeedsSlowReader
        return event

    def _compose_node(self, event: Any, depth: int) -> Node:
        self._nodes_left -= 1
        if self._nodes_left < 0 or depth > self._max_depth:
            raise _NeedsSlowReader
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise _NeedsSlowReader
            return self._anchors[event.anchor]
        if event.tag is not None:
            raise _NeedsSlowReader
        if isinstance(event, yaml.ScalarEvent):
            if not event.value and event.implicit[0]:
                raise _NeedsSlowReader  # nothing stands nowhere: on which line depends on the reader
            tag = _resolve_scalar_tag(event.value, event.implicit)
            return self._remember_anchor(
                event, ScalarNode(tag, event.value, event.start_mark, event.end_mark, style=event.style)
            )
        return self._compose_collection(event, depth)

    def _compose_collection(self, start: Any, depth: int) -> Node:
        is_mapping = isinstance(start, yaml.MappingStartEvent)
        tag = _RESOLVER.DEFAULT_MAPPING_TAG if is_mapping else _RESOLVER.DEFAULT_SEQUENCE_TAG
        kind = MappingNode if is_mapping else SequenceNode
        node = self._remember_anchor(start, kind(tag, [], start.start_mark, None, flow_style=start.flow_style))
        while not isinstance(event := next(self._events), yaml.CollectionEndEvent):
            child = self._compose_node(event, depth + 1)
            node.value.append((child, self._compose_node(next(self._events), depth + 1)) if is_mapping else child)
        return node

    def _remember_anchor(self, event: Any, node: Node) -> Node:
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node


MAX_BYTES = 2**19
"""Also of all texts together, as aliases repeat them. Scanning a mebibyte takes seconds."""
MAX_NODES = 30_000
"""Enough for tens of thousands of typed numbers; larger arrays are drawn, not typed."""
MAX_DEPTH = 100


@dataclass(frozen=True)
class YamlDocument:
    """Plain data, and the line on which each field starts."""

    data: Any
    lines: dict[FieldPath, int]

    def locate(self, path: FieldPath) -> tuple[FieldPath, int | None]:
        """Return the longest part of a path that exists in the file, and its line.

        Parts that the file does not have (a validator's own labels, a missing field) are passed over.
        """
        existing: FieldPath = ()
        for part in path:
            if (*existing, part) in self.lines:
                existing = (*existing, part)
        return existing, self.lines.get(existing)

    def find_place_in_file(self, path: FieldPath) -> FieldPath:
        """Return the place in the file that a path leads to."""
        return self.locate(path)[0]

    def referenced_value_at(self, path: FieldPath) -> tuple[str, int | None] | None:
        """Return the name and the line of a value that is put in its place from elsewhere; here there is none."""
        return None


class DocumentWithoutFile(YamlDocument):
    """Plain data that never stood in a file: its fields have names and no lines."""

    def locate(self, path: FieldPath) -> tuple[FieldPath, int | None]:
        """Return the longest part of a path that exists in the data, and no line."""
        existing: FieldPath = ()
        data = self.data
        for part in path:
            is_field = isinstance(data, dict) and part in data
            if is_field or (isinstance(data, list) and isinstance(part, int) and 0 <= part < len(data)):
                existing, data = (*existing, part), data[part]
        return existing, None


def read_yaml(path: Path, expected: str = "a title, a source, an operation and a list of cases") -> YamlDocument:
    """Read one YAML file; ``expected`` says what an empty one lacks.

    Raises ``YamlFault``; never runs code and never reads anything else.
    """
    text = _read_text(path)
    root = compose_with_libyaml(text, MAX_NODES, MAX_DEPTH - 1)
    is_measured = root is not None and "*" not in text  # it is no larger than it looks: nothing can be an alias
    root = root or _compose_with_ruamel(text)
    if root is None or (isinstance(root, ScalarNode) and not root.value and root.style is None):
        raise YamlFault(f"the file is empty; expected {expected}", 1)
    if not is_measured:
        _check_size(root)
    builder = _DataBuilder()
    data = builder.build(root, ())
    if builder.faults:
        first, *others = builder.faults
        first.data, first.others = data, tuple(others)
        raise first
    return YamlDocument(data, builder.lines)


def _compose_with_ruamel(text: str) -> Node | None:
    """Return the root of a text, None without one. Raises ``YamlFault`` for what is no YAML or not allowed."""
    try:
        reader = YAML(typ="safe", pure=True)
        reader.Parser = _CheckedParser
        reader.composer.warn_double_anchors = False  # YAML allows them; a warning would only puzzle
        root: Node | None = reader.compose(text)
    except MarkedYAMLError as error:
        raise _convert_parse_error(error) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlFault(f"not valid YAML: the character U+{error.character:04X} is not allowed", line) from None
    except (YAMLError, ValueError, OverflowError) as error:  # the last of a character that no machine counts to
        raise YamlFault(f"not valid YAML: {' '.join(str(error).split())}") from None
    return root


def _read_text(path: Path) -> str:
    try:
        status = path.stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # a pipe, say, would never end
            raise YamlFault("cannot be read: it is no regular file")
        if status.st_size > MAX_BYTES:
            raise YamlFault(
                f"{status.st_size} bytes; a case file has {MAX_BYTES} at most, draw large arrays instead of typing them"
            )
        content = path.read_bytes()
    except OSError as error:
        raise YamlFault(f"cannot be read: {error.strerror}") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise YamlFault(f"not UTF-8: byte 0x{content[error.start]:02x} at position {error.start}", line) from None


def _convert_parse_error(error: MarkedYAMLError) -> YamlFault:
    mark = error.problem_mark or error.context_mark
    context = error.context or ""
    if mark and error.context_mark and error.context_mark.line != mark.line:
        context = f"{context} that starts on line {error.context_mark.line + 1}"
    problem = ", ".join(part for part in (context, error.problem) if part) or "cannot be parsed"
    return YamlFault(f"not valid YAML: {problem}", mark.line + 1 if mark else None)


class _CheckedParser(Parser):
    """Refuses tags, older YAML, and what is too long or too deep, before a node is made of it."""

    depth = nodes = 0

    def get_event(self) -> Any:
        """Return the next event of the file, if a case may have it. Raises ``YamlFault`` for one that it may not."""
        event = super().get_event()
        line = event.start_mark.line + 1
        tag, version = getattr(event, "tag", None), getattr(event, "version", None)
        if tag is not None:
            shown = str(tag).replace("tag:yaml.org,2002:", "!!")
            raise YamlFault(f"the tag {shown} is not allowed: a case is plain data, nothing is built from it", line)
        if version is not None and tuple(version) != (1, 2):
            raise YamlFault(f"YAML {'.'.join(map(str, version))}; expected YAML 1.2, without a %YAML line", line)
        self.nodes += isinstance(event, NodeEvent)
        self.depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        _check_limits(self.nodes, self.depth, line)
        return event


def _check_limits(nodes: int, depth: int, line: int) -> None:
    if depth > MAX_DEPTH:
        raise YamlFault(f"nested more than {MAX_DEPTH} levels deep", line)
    if nodes > MAX_NODES:
        raise YamlFault(
            f"more than {MAX_NODES} values (aliases expanded); draw large arrays instead of typing them", line
        )


def _check_size(root: Node) -> None:
    """Measure the nodes as aliases expand them, before anything is expanded."""
    measured: dict[int, tuple[int, int, int]] = {}
    open_nodes: set[int] = set()

    def measure(node: Node, depth: int) -> tuple[int, int, int]:
        """Return how many nodes, levels and characters a node expands to. Raises ``YamlFault`` for too many."""
        identity, line = id(node), node.start_mark.line + 1
        if identity in open_nodes:
            raise YamlFault("an alias refers to a node that contains it", line)
        if identity not in measured:
            open_nodes.add(identity)
            children = chain.from_iterable(node.value) if isinstance(node, MappingNode) else node.value
            inner = [] if isinstance(node, ScalarNode) else [measure(child, depth + 1) for child in children]
            open_nodes.discard(identity)
            length = len(node.value) if isinstance(node, ScalarNode) else 0
            measured[identity] = (
                1 + sum(nodes for nodes, _, _ in inner),
                1 + max((levels for _, levels, _ in inner), default=0),
                length + sum(characters for _, _, characters in inner),
            )
        nodes, levels, characters = measured[identity]
        _check_limits(nodes, depth + levels, line)
        if characters > MAX_BYTES:
            raise YamlFault(f"more than {MAX_BYTES} characters (aliases expanded)", line)
        return nodes, levels, characters

    measure(root, 0)


@dataclass
class _DataBuilder:
    """Builds plain data from nodes; a field that cannot be built becomes a fault, the rest is built."""

    lines: dict[FieldPath, int] = field(default_factory=dict)
    faults: list[YamlFault] = field(default_factory=list)

    def build(self, node: Node, path: FieldPath) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, SequenceNode):
            return [self.build(child, (*path, index)) for index, child in enumerate(node.value)]
        if isinstance(node, MappingNode):
            return self._build_mapping(node, path)
        assert isinstance(node, ScalarNode), "YAML has sequences, mappings and scalars"
        try:
            return build_scalar(node, path)
        except YamlFault as fault:
            self.faults.append(fault)
            return None

    def _build_mapping(self, node: MappingNode, path: FieldPath) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            try:
                key = build_key(key_node, path)
            except YamlFault as fault:
                self.faults.append(fault)
                continue
            if key in mapping:
                self.faults.append(YamlFault("this field is given twice", line, (*path, key)))
                continue
            self.lines[(*path, key)] = line
            mapping[key] = self.build(value_node, (*path, key))
        return mapping
