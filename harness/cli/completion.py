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

_CASE = re.compile(r"^  - \{?(?:id|name): ", re.MULTILINE)
_IN_LINE = "  - {"
_QUOTED = r"\"([^\"]*)\"|'((?:[^']|'')*)'"
_KEYS = {
    True: re.compile(rf"[{{,] *(id|name): *(?:{_QUOTED}|([^,}}]*))"),
    False: re.compile(rf"^(?: {{4}}|  - )(id|name): *(?:{_QUOTED}|([^\n]*(?:\n {{6,}}[^\n]*)*))", re.MULTILINE),
}
"""Patterns of a case's name and id: for a case in braces, and for one with a line per field."""
_OF_FILE = re.compile(r"^for_each:", re.MULTILINE)
_OF_CASE = re.compile(r"\b(?:for_each|design):")
_TAG = re.compile(r"^  ([\w-]+):", re.MULTILINE)
_NO_CASES = ("tags.yaml",)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _last_of_several(names: Iterable[str], incomplete: str) -> list[str]:
    """Complete the last of some names with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(names, last)]


def complete_cases(incomplete: str) -> list[str]:
    """Return bundled files, or the cases of a bundled file."""
    root = Path(str(files("attncheck.cases")))
    path_by_stem = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
    stems = [stem for stem, path in path_by_stem.items() if path.name not in _NO_CASES]
    inside = [stem for stem in stems if incomplete.startswith(f"{stem}/") or stem == incomplete]
    ids = [f"{stem}/{name}" for stem in inside for name in _cases_of(path_by_stem[stem].read_text(encoding="utf-8"))]
    return _beginning([*stems, *ids], incomplete)


def _cases_of(text: str) -> Iterator[str]:
    """Yield the last part of the id of every case of a file; with a * if it stands for several cases."""
    from attncheck.common.wording import slug

    of_file = bool(_OF_FILE.search(text))
    text = text[text.find("\ncases:") :]
    begins = [match.start() for match in _CASE.finditer(text)]
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
        part = text[begin:end]
        keys = {key: next(filter(None, text), "") for key, *text in _KEYS[part.startswith(_IN_LINE)].findall(part)}
        if called := keys.get("id", "").strip() or slug(keys.get("name", "")):
            yield f"{called}-*" if _OF_CASE.search(part) else f"{called}{'*' if of_file else ''}"


def _implementations() -> list[str]:
    from attncheck.backends import EVERYTHING, published

    modes = [f"{name}.{mode}" for name, entry in EVERYTHING.items() for mode in entry.all_modes]
    return [*EVERYTHING, *modes, *sorted(published())]


def _tags() -> list[str]:
    text = files("attncheck.cases").joinpath(*_NO_CASES).read_text(encoding="utf-8")
    return _TAG.findall(text[text.find("\ntags:") :])


def _listed_in(module: str, attribute: str) -> Iterable[str]:
    names: Iterable[str] = getattr(import_module(f"attncheck.{module}"), attribute)
    return names


def _completing(
    names: Callable[[], Iterable[str]], complete: Callable[[Iterable[str], str], list[str]]
) -> Callable[[str], list[str]]:
    """Return the function that completes names, which are looked up on request."""

    def completed(incomplete: str) -> list[str]:
        return complete(names(), incomplete)

    return completed


_BACKENDS = partial(_listed_in, "backends", "BACKENDS")
complete_implementation = _completing(_implementations, _beginning)
"""The shell completes a file.py:function."""
complete_framework = _completing(_BACKENDS, _beginning)
complete_signature = _completing(partial(_listed_in, "backends.families", "FAMILIES"), _beginning)
complete_implementations = _completing(lambda: ["all", *_implementations()], _last_of_several)
complete_backends = _completing(_BACKENDS, _last_of_several)
complete_dtypes = _completing(partial(_listed_in, "spec", "DTYPES"), _last_of_several)
complete_tags = _completing(_tags, _last_of_several)
complete_properties = _completing(partial(_listed_in, "spec", "PROPERTIES"), _last_of_several)
