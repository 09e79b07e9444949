"""Runs the installation of the documents as on a machine that has the public index and nothing else.

    tox -e install                 # all of them
    tox -e install -- README.md    # those of one document

Every command in a section "Install" of README.md and docs/index.md runs in a virtual environment of its own, made in a
copy of this checkout; then attncheck runs there. The commands of docs/how-to/ci.md run in one environment, with the
files that the page shows. HOME and all caches are empty, and no setting of pip or uv is passed on.

The exit code is 1 if a command fails, and 3 if one could not run because PyTorch's own index cannot be reached.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu/"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INSTALL = re.compile(r"^## Install\n(.*?)^## ", re.MULTILINE | re.DOTALL)
_SMALL_CHECK = "attncheck check softmax --no-report --quiet"
_KEPT_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "HTTPS_PROXY", "https_proxy", "LANG")
"""How the network is reached, which decides nothing that is installed."""
AGREE, FAILED, NOT_RUN = 0, 1, 3


@dataclass(frozen=True)
class Machine:
    """An empty home, and a checkout in which commands run."""

    home: Path
    checkout: Path

    def environment(self, name: str) -> dict[str, str]:
        """Make a virtual environment; return the variables that a shell has in which it is active."""
        folder = self.home / name
        venv.create(folder, with_pip=True, clear=True)
        kept = {variable: os.environ[variable] for variable in _KEPT_VARIABLES if variable in os.environ}
        path = f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        return {**kept, "PATH": path, "HOME": str(self.home), "VIRTUAL_ENV": str(folder), "PIP_CONFIG_FILE": os.devnull}

    def run(self, command: str, variables: dict[str, str], folder: Path | None = None) -> bool:
        """Run a command in a folder, by default the checkout; print how it ended, and return whether it succeeded."""
        started = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder or self.checkout,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        size = _size(Path(variables["VIRTUAL_ENV"]))
        print(f"{'ok' if done.returncode == 0 else f'exit {done.returncode}'}: {command}", end=" ")
        print(f"({time.monotonic() - started:.0f} s; the environment has {size / 1e6:,.0f} MB)", flush=True)
        if done.returncode:
            print((done.stdout + done.stderr)[-2000:], flush=True)
        return done.returncode == 0


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder, without bytecode."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.suffix != ".pyc" and not path.is_dir())


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return [body for name, body in _BLOCK.findall(text) if name == language]


def commands(text: str) -> list[str]:
    """Return the commands of a page, without their comments."""
    lines = "\n".join(blocks(text, "sh")).replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"\s+#.*", "", line).strip())]


def install_commands(machine: Machine, page: str, *, has_pytorch: bool) -> Iterator[int]:
    """Run each command of a page's installation by itself, then a small check; yield exit codes."""
    [section] = _INSTALL.findall((machine.checkout / page).read_text(encoding="utf-8"))
    for number, command in enumerate(line for line in commands(section) if "install" in line):
        if "--torch-backend" in command and not has_pytorch:
            print(f"not run: {command} ({PYTORCH_INDEX} cannot be reached)", flush=True)
            yield NOT_RUN
            continue
        variables = machine.environment(f"install-{number}")
        ready = not command.startswith("uv ") or machine.run("pip install --quiet uv", variables)
        ok = ready and machine.run(command, variables) and machine.run(_SMALL_CHECK, variables)
        yield AGREE if ok else FAILED


def page_commands(machine: Machine, page: str) -> Iterator[int]:
    """Write the files that a page shows, and run its commands; yield exit codes."""
    text = (machine.checkout / page).read_text(encoding="utf-8")
    variables, work = machine.environment("page"), machine.home / "work"
    work.mkdir()
    if not machine.run("pip install --quiet . pytest", variables):
        yield FAILED
        return
    for language in ("python", "toml"):
        for body in blocks(text, language):
            if header := re.match(r"# ([\w.]+\.(?:py|toml))\n", body):
                (work / header[1]).write_text(body, encoding="utf-8")
    for command in commands(text):
        yield AGREE if machine.run(command, variables, work) else FAILED


def main(pages: list[str]) -> int:
    """Run the commands of pages, by default of all that install attncheck."""
    pages = pages or ["README.md", "docs/index.md", "docs/how-to/ci.md"]
    try:
        urlopen(PYTORCH_INDEX, timeout=10).close()
        has_pytorch = True
    except URLError:
        has_pytorch = False
    codes: list[int] = []
    for page in pages:
        print(f"{page}:", flush=True)
        with TemporaryDirectory() as folder:
            machine = Machine(Path(folder) / "home", Path(folder) / "checkout")
            machine.home.mkdir()
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(machine.checkout)], check=True)
            if page.startswith("docs/how-to"):
                codes += page_commands(machine, page)
            else:
                codes += install_commands(machine, page, has_pytorch=has_pytorch)
    print(f"{codes.count(AGREE)} passed, {codes.count(FAILED)} failed, {codes.count(NOT_RUN)} not run")
    return FAILED if FAILED in codes else NOT_RUN if NOT_RUN in codes or not codes else AGREE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
