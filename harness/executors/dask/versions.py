"""What has to be the same on every machine: numbers of two versions in one report would be nobody's."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from attncheck.execution.runner import Group
from attncheck.execution.user_code import UserImplementation

ABSENT = "nothing"
_ALWAYS = ("attncheck", "distributed", "numpy", "ml_dtypes", "python-flint")
_CODE = ("attncheck.backends", "attncheck")
_BESIDE = ("backends", "cases", "reports")
"""What lies in the folder of an installed `attncheck`, and beside it in a checkout."""
_PYTHON, _SOURCE = "Python", "attncheck's code"


@dataclass(frozen=True)
class Asked:
    """Distributions, and files by path, that have to be the same."""

    packages: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What the versions are listed under."""
        return (_PYTHON, _SOURCE, *self.packages, *self.files)


def asked_of(groups: Iterable[Group]) -> Asked:
    """Return what has to be the same where these groups run."""
    entries = [group.implementation.entry for group in groups]
    packages = {*_ALWAYS, *(name for entry in entries for name in (*entry.packages, *entry.distributions))}
    own = {entry.target.module for entry in entries if isinstance(entry, UserImplementation)}
    return Asked(tuple(sorted(packages)), tuple(sorted(path for path in own if path.endswith(".py"))))


def found_here(asked: Asked) -> dict[str, str]:
    """Return the versions of what is asked for as they are in this process."""
    found = {_PYTHON: platform.python_version(), _SOURCE: _digest_of_code()}
    found |= {name: _version(name) for name in asked.packages}
    return found | {path: _digest(Path(path)) if Path(path).is_file() else ABSENT for path in asked.files}


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Say in words what is not as expected."""
    return [
        f"{name}: {found.get(name, ABSENT)} there, {wanted} here"
        for name, wanted in expected.items()
        if found.get(name, ABSENT) != wanted
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT


@cache
def _digest_of_code() -> str:
    """Checkouts of one version may still differ."""
    folders = [Path(folder) for name in _CODE for folder in import_module(name).__path__]
    found = [(path.relative_to(folder), path) for folder in folders for path in folder.rglob("*.py")]
    files = [(name.as_posix(), path) for name, path in found if name.parts[0] not in _BESIDE]
    total = sha256()
    for name, path in sorted(files):
        total.update(f"{name}\0{_digest(path)}\0".encode())
    return total.hexdigest()[:12]


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()[:12]
