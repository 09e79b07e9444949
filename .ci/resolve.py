"""Fails where requirements of attncheck contradict each other on the public index. Nothing is downloaded but metadata.

For each Python that attncheck supports, all extras and dependency groups are resolved together, with and without
`constraints.txt`. A solution of all is a solution of each, so only a failure makes them be resolved one by one, to name
what contradicts. The pins that tox.ini adds to an environment are resolved with the constraints, too. At last the lower
bounds of pyproject.toml are resolved: a bound that cannot be installed promises what nobody can have.

Settings of the machine (other indexes, folders of wheels) are left out, so that the answer is everybody's.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ("--constraint", str(ROOT / "constraints.txt"))
_PLATFORM = "x86_64-manylinux_2_35"
"""Linux with glibc 2.35, the oldest for which mlx has wheels."""
_CONNECTED = 8
"""Resolutions that wait for the index side by side."""
_SOLVED = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)
_CLASSIFIER = "Programming Language :: Python :: 3."


@dataclass(frozen=True)
class Request:
    """Requirements that must have a solution on one Python."""

    name: str
    python: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Resolver:
    """uv with the public index and a cache: answers come from the cache where that suffices."""

    uv: Path
    cache: Path

    def solve(self, request: Request, *, online: bool = False) -> tuple[str, str]:
        """Return the solution, or nothing and the reason why there is none.

        uv may query the index again in every run. Offline it answers from the cache, ten times as fast. If the cache
        is not enough, uv goes online.
        """
        done = None if online else self._run(request, "--offline")
        if done is None or done.returncode:
            done = self._run(request)
        return ("", _reason(done.stderr)) if done.returncode else (done.stdout, "")

    def _run(self, request: Request, *options: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.uv), "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
        command += ["--only-binary", ":all:", "--cache-dir", str(self.cache), "--python-version", request.python]
        command += ["--python-platform", _PLATFORM, *options, *request.arguments]
        return subprocess.run(command, env=_neutral(), capture_output=True, text=True, check=False, cwd=ROOT)


def _neutral() -> dict[str, str]:
    """Return the environment without what configures pip and uv on this machine."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}


def _reason(stderr: str) -> str:
    """Return uv's explanation as one line."""
    cause = re.sub(r"\s+", " ", stderr.partition("cause:")[2] or stderr).strip()
    return cause.partition(" hint:")[0][:600]


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pythons(project: dict[str, Any]) -> list[str]:
    """Return the releases of Python that the classifiers name."""
    classifiers = project["project"]["classifiers"]
    return [line.removeprefix(_CLASSIFIER[:-2]) for line in classifiers if line.startswith(_CLASSIFIER)]


def parts(project: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return each extra and each dependency group, with the arguments by which uv resolves it."""
    extras = {
        f"extra {name}": ("pyproject.toml", "--extra", name) for name in project["project"]["optional-dependencies"]
    }
    groups = {f"group {name}": ("--group", name) for name in project["dependency-groups"]}
    return {"no extra": ("pyproject.toml",), **extras, **groups}


def tox_pins() -> dict[str, str]:
    """Return what tox.ini adds to the environment of an extra, by the name of the extra."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    return dict(re.findall(r"^(\w+): *(\S+==\S+)$", tox["testenv"]["deps"], re.MULTILINE))


def together(every: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the arguments by which uv resolves all extras and groups at once."""
    groups = [argument for name, arguments in every.items() if name.startswith("group") for argument in arguments]
    return ("pyproject.toml", "--all-extras", *groups)


def contradictions(resolver: Resolver, project: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each reason why extras or groups have no solution, with their names.

    They are resolved one by one only for the first Python on which they have no solution together for that reason.
    """
    every = parts(project)
    for words, constraints in (("with constraints.txt", CONSTRAINTS), ("without constraints.txt", ())):
        where: dict[str, list[str]] = {}
        for python in pythons(project):
            if reason := resolver.solve(Request("all", python, (*together(every), *constraints)))[1]:
                where.setdefault(reason, []).append(python)
        for reason, releases in where.items():
            singles = [Request(name, releases[0], (*every[name], *constraints)) for name in every]
            names = [single.name for single, _ in _failures(resolver, singles)]
            if names:
                yield f"{words}, Python {', '.join(releases)}: {', '.join(names)}: {reason}"
            else:
                print(f"Each can be installed, but not all together, {words}: {reason}", file=sys.stderr)


def pinned_environments(resolver: Resolver, project: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each pin of tox.ini that contradicts the extra of its environment or the constraints."""
    requests = []
    for name, pin in tox_pins().items():
        file = resolver.cache.parent / f"{name}.txt"
        file.write_text(pin + "\n", encoding="utf-8")
        arguments = ("pyproject.toml", "--extra", name, str(file), *CONSTRAINTS)
        requests.append(Request(f"tox environment {name} with {pin}", pythons(project)[0], arguments))
    for request, why in _failures(resolver, requests):
        yield f"{request.name}: {why}"


def unreachable_bounds(resolver: Resolver, project: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each lower bound that no installation of its extra has on the oldest Python."""
    extras = {f"extra {name}": lines for name, lines in project["project"]["optional-dependencies"].items()}
    required = {"no extra": project["project"]["dependencies"], **extras}
    every, oldest = parts(project), pythons(project)[0]
    requests = [Request(name, oldest, (*every[name], "--resolution", "lowest-direct")) for name in required]
    with ThreadPoolExecutor(_CONNECTED) as pool:
        # The cache has the newest versions only, and lowest means the lowest of the index.
        answers = list(pool.map(partial(resolver.solve, online=True), requests))
    for request, (solution, why) in zip(requests, answers, strict=True):
        if why:
            yield f"{request.name}, lower bounds: {why}"
        chosen = {canonicalize_name(name): version for name, version in _SOLVED.findall(solution)}
        for requirement in map(Requirement, required[request.name]):
            version = chosen.get(canonicalize_name(requirement.name))
            bound = str(requirement.specifier).replace(">=", "==")
            if version and version not in SpecifierSet(bound):
                # uv prefers new releases of what is required indirectly, which may forbid a bound that is possible.
                file = resolver.cache.parent / f"{requirement.name}.txt"
                file.write_text(f"{requirement.name}{bound}\n", encoding="utf-8")
                arguments = (*every[request.name], "--constraint", str(file))
                if resolver.solve(Request(request.name, oldest, arguments), online=True)[1]:
                    yield f"{request.name}: {requirement} is too low a bound; {version} can be installed"


def _failures(resolver: Resolver, requests: Sequence[Request]) -> list[tuple[Request, str]]:
    """Return the requests that have no solution, with the reasons."""
    with ThreadPoolExecutor(_CONNECTED) as pool:
        answers = list(pool.map(resolver.solve, requests))
    return [(request, why) for request, (_, why) in zip(requests, answers, strict=True) if why]


def main() -> int:
    """Print what contradicts; 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--uv", type=Path, default=ROOT / ".tools" / "bin" / "uv")
    arguments = parser.parse_args()
    started, project = time.monotonic(), _pyproject()
    with TemporaryDirectory() as folder:
        resolver = Resolver(arguments.uv, Path(folder) / "cache")
        wrong = [*contradictions(resolver, project), *pinned_environments(resolver, project)]
        wrong += unreachable_bounds(resolver, project)
    for line in wrong:
        print(f"contradiction: {line}", file=sys.stderr)
    number = len(parts(project))
    print(f"resolved {number} sets of requirements for Python {', '.join(pythons(project))}", end=" ")
    print(f"in {time.monotonic() - started:.0f} s: {len(wrong)} contradictions")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
