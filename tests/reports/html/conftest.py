"""Pages as trees of elements, read with the standard library's parser; every end tag must be where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncheck.reports.frames import Frames
from attncheck.reports.html.render import render_html
from attncheck.results.format import EXACT, Row, StoredArray, bound_name

_VOID = {"meta", "link", "br", "input", "hr", "img"}


@dataclass
class Element:
    """One element: its attributes, and what is in it."""

    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All its text, with spaces made one."""
        parts = (child if isinstance(child, str) else child.text for child in self.children)
        return " ".join(" ".join(parts).split())

    @property
    def raw(self) -> str:
        """All its text as it is."""
        return "".join(child if isinstance(child, str) else child.raw for child in self.children)

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    def all(self, tag: str = "", **attributes: str) -> list[Element]:
        """Elements below with a tag, and with attributes; ``of_class`` names one of the classes."""
        return [
            element
            for element in self.walk()
            if tag in ("", element.tag)
            and all(
                value in element.classes if name == "of_class" else element.attributes.get(name) == value
                for name, value in attributes.items()
            )
        ]

    def one(self, tag: str = "", **attributes: str) -> Element:
        (found,) = self.all(tag, **attributes)
        return found

    def walk(self) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child.walk()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"an attribute of {tag} is there twice"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(text: str) -> Element:
    """Read a page into its elements."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [reader.root], "an element is not closed"
    return reader.root


@pytest.fixture(scope="session")
def page_of() -> Callable[..., Element]:
    """Render frames and read the page."""
    return lambda frames, budget=None: parse(render_html(frames, budget))


@pytest.fixture
def failing_frames(
    make_row: Callable[..., Row], write_run: Callable[..., Path], frames_of: Callable[..., Frames]
) -> Frames:
    """One case on three implementations: right, wrong at one of its three weights, and known to be wrong."""
    exact, bound = np.array([[[[0.1, 0.2, 0.7]]]]), np.full((1, 1, 1, 3), 0.01)
    wrong = np.array([[[[0.1, 0.205, 0.9]]]])
    worst: dict[str, Any] = {
        "verdict": "numeric",
        "message": "20 times the bound",
        "index": "0,0,0,2",
        "value": 0.9,
        "reference": 0.7,
        "difference": 0.2,
        "allowed": 0.01,
        "against": "exact",
        "ratio": 20.0,
        "tier": "proven",
        "introduced_ratio": 19.0,
        "introduced_tier": "proven",
    }
    known = {"xfail": True, "reason": "It always was", "thread": "numpy/numpy#12", "implementation": "old.eager"}
    rows = [
        make_row(ratio=0.25, tier="within", introduced_ratio=0.125, implementation="good.eager"),
        make_row(**worst, implementation="bad.eager"),
        make_row(**worst, **known),
        make_row(comparison="pair", stage="weights", implementation="bad.eager", other="good.eager", verdict="numeric",
                 index="0,0,0,2", ratio=10.0, difference=0.2, value=0.9, reference=0.7),
        make_row(comparison="pair", stage="weights", implementation="good.eager", other="old.eager", ratio=0.5),
    ]  # fmt: skip
    arrays = [
        StoredArray("file/one", "float64", name, "weights", array)
        for name, array in [
            ("good.eager", exact),
            ("bad.eager", wrong),
            ("old.eager", wrong),
            (EXACT, exact),
            (bound_name("native"), bound),
        ]
    ]
    return frames_of(write_run(rows, arrays=arrays))
