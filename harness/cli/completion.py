"""Completions of an argument that is being typed in a shell: names of cases, implementations, dtypes and tags.

A shell asks at every press of a key, so nothing heavy is imported here: neither NumPy nor a reader of YAML. The names
of the bundled cases are found in the text of their files. A case with ``for_each`` or a design stands for several; what
is offered for it is a glob, which commands take as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path

_CASE_PATTERN = re.compile(r"^  - \{?(?:id|name): ", re.MULTILINE)
_IN_LINE = "  - {"
_QUOTED_PATTERN = r"\"([^\"]*)\"|'((?:[^']|'')*)'"
_KEY_PATTERNS = {
    True: re.compile(rf"[{{,] *(id|name): *(?:{_QUOTED_PATTERN}|([^,}}]*))"),
    False: re.compile(rf"^(?: {{4}}|  - )(id|name): *(?:{_QUOTED_PATTERN}|([^\n]*(?:\n {{6,}}[^\n]*)*))", re.MULTILINE),
}
"""Patterns of a case's name and id: for a case in braces, and for one with a line per field."""
_FILE_REPEATS_PATTERN = re.compile(r"^for_each:", re.MULTILINE)
_CASE_REPEATS_PATTERN = re.compile(r"\b(?:for_each|design):")
_TAG_PATTERN = re.compile(r"^  ([\w-]+):", re.MULTILINE)
_FILES_WITHOUT_CASES = ("tags.yaml",)


def _filter_by_prefix(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _complete_last_name(names: Iterable[str], incomplete: str) -> list[str]:
    """Complete the last of some names with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _filter_by_prefix(names, last)]


def complete_cases(incomplete: str) -> list[str]:
    """Return bundled files, or the cases of a bundled file."""
    root = Path(str(files("attncheck.cases")))
    path_by_stem = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
    stems = [stem for stem, path in path_by_stem.items() if path.name not in _FILES_WITHOUT_CASES]
    inside = [stem for stem in stems if incomplete.startswith(f"{stem}/") or stem == incomplete]
    ids = [f"{stem}/{name}" for stem in inside for name in _case_ids_in(path_by_stem[stem].read_text(encoding="utf-8"))]
    return _filter_by_prefix([*stems, *ids], incomplete)


def _case_ids_in(text: str) -> Iterator[str]:
    r"""Yield the last part of the id of every case of a file; with a * if it stands for several cases.

    Example:
        >>> text = "dtype: float32\ncases:\n  - name: First case\n    for_each: {n: [1, 2]}\n  - id: second\n"
        >>> list(_case_ids_in(text))
        ['first-case-*', 'second']
    """
    from attncheck.common.wording import slug

    of_file = bool(_FILE_REPEATS_PATTERN.search(text))
    text = text[text.find("\ncases:") :]
    begins = [match.start() for match in _CASE_PATTERN.finditer(text)]
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
        part = text[begin:end]
        keys = {
            key: next(filter(None, text), "") for key, *text in _KEY_PATTERNS[part.startswith(_IN_LINE)].findall(part)
        }
        if called := keys.get("id", "").strip() or slug(keys.get("name", "")):
            yield f"{called}-*" if _CASE_REPEATS_PATTERN.search(part) else f"{called}{'*' if of_file else ''}"


def _implementation_names() -> list[str]:
    from attncheck.backends import ALL_ENTRIES, published_entry_points

    modes = [f"{name}.{mode}" for name, entry in ALL_ENTRIES.items() for mode in entry.all_modes]
    return [*ALL_ENTRIES, *modes, *sorted(published_entry_points())]


def _tag_names() -> list[str]:
    text = files("attncheck.cases").joinpath(*_FILES_WITHOUT_CASES).read_text(encoding="utf-8")
    return _TAG_PATTERN.findall(text[text.find("\ntags:") :])


def _names_in(module: str, attribute: str) -> Iterable[str]:
    names: Iterable[str] = getattr(import_module(f"attncheck.{module}"), attribute)
    return names


def _make_completer(
    names: Callable[[], Iterable[str]], complete: Callable[[Iterable[str], str], list[str]]
) -> Callable[[str], list[str]]:
    """Return the function that completes names, which are looked up on request."""

    def completed(incomplete: str) -> list[str]:
        return complete(names(), incomplete)

    return completed


_backend_names = partial(_names_in, "backends", "BACKENDS")
complete_implementation = _make_completer(_implementation_names, _filter_by_prefix)
"""The shell completes a file.py:function."""
complete_framework = _make_completer(_backend_names, _filter_by_prefix)
complete_signature = _make_completer(partial(_names_in, "backends.families", "FAMILIES"), _filter_by_prefix)
complete_implementations = _make_completer(lambda: ["all", *_implementation_names()], _complete_last_name)
complete_backends = _make_completer(_backend_names, _complete_last_name)
complete_dtypes = _make_completer(partial(_names_in, "spec", "DTYPES"), _complete_last_name)
complete_tags = _make_completer(_tag_names, _complete_last_name)
complete_properties = _make_completer(partial(_names_in, "spec", "PROPERTIES"), _complete_last_name)
