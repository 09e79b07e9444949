"""Pages of HTML, read into their elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "input", "hr", "img", "wbr"}
"""Elements without an end."""


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
        if tag not in VOID:
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
