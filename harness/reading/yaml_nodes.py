"""Nodes of a YAML text by libyaml, where it is certain that ruamel.yaml would read the same.

libyaml's scanner, in C, takes a thirtieth of the time, but reads YAML 1.1 and words its errors otherwise. So it reads
ordinary files alone: of a file that either could read in another way, that one of them refuses, or that a case may not
be, nothing is returned, and the slow reader says what is to be said. Scalars are resolved by ruamel.yaml here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

_RESOLVER = YAML(typ="safe", pure=True).resolver
_resolved = lru_cache(maxsize=4096)(partial(_RESOLVER.resolve, ScalarNode))
"""The tag of a scalar, by its text and whether it stands in quotes: files say the same words again and again."""

_EXTRAORDINARY = re.compile(
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


class _Unfit(Exception):
    """The text is for the slow reader."""


def compose_fast(text: str, max_nodes: int, max_depth: int) -> Node | None:
    """Return the root of a text, or None where the slow reader has to read it: without a document, too."""
    if not hasattr(yaml, "CSafeLoader") or _EXTRAORDINARY.search(text):
        return None
    try:
        return _Composer(yaml.parse(text, Loader=yaml.CSafeLoader), max_nodes, max_depth).document()
    except (_Unfit, yaml.YAMLError, ValueError, OverflowError):
        return None


class _Composer:
    """Makes nodes of events: as many, and as deep, as a case may have."""

    def __init__(self, events: Iterator[Any], max_nodes: int, max_depth: int) -> None:
        self._events = events
        self._nodes_left, self._max_depth = max_nodes, max_depth
        self._anchors: dict[str, Node] = {}

    def document(self) -> Node:
        """Compose the only document of the text."""
        self._expect(yaml.StreamStartEvent)
        start = self._expect(yaml.DocumentStartEvent)
        if start.version is not None or start.tags:
            raise _Unfit
        root = self._node(next(self._events), 0)
        self._expect(yaml.DocumentEndEvent)
        self._expect(yaml.StreamEndEvent)
        return root

    def _expect(self, kind: type) -> Any:
        event = next(self._events, None)
        if not isinstance(event, kind):
            raise _Unfit
        return event

    def _node(self, event: Any, depth: int) -> Node:
        self._nodes_left -= 1
        if self._nodes_left < 0 or depth > self._max_depth:
            raise _Unfit
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise _Unfit
            return self._anchors[event.anchor]
        if event.tag is not None:
            raise _Unfit
        if isinstance(event, yaml.ScalarEvent):
            if not event.value and event.implicit[0]:
                raise _Unfit  # nothing stands nowhere: on which line depends on the reader
            tag = _resolved(event.value, event.implicit)
            return self._named(event, ScalarNode(tag, event.value, event.start_mark, event.end_mark, style=event.style))
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(event, depth)
        return self._mapping(event, depth)

    def _sequence(self, start: Any, depth: int) -> Node:
        tag = _RESOLVER.DEFAULT_SEQUENCE_TAG
        node = self._named(start, SequenceNode(tag, [], start.start_mark, None, flow_style=start.flow_style))
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            node.value.append(self._node(event, depth + 1))
        return node

    def _mapping(self, start: Any, depth: int) -> Node:
        tag = _RESOLVER.DEFAULT_MAPPING_TAG
        node = self._named(start, MappingNode(tag, [], start.start_mark, None, flow_style=start.flow_style))
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event, depth + 1)
            node.value.append((key, self._node(next(self._events), depth + 1)))
        return node

    def _named(self, event: Any, node: Node) -> Node:
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node
