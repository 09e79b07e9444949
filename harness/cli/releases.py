"""Old releases of what is judged: an environment for each, made once and kept, and a check that runs in it.

Only the release, and what it requires otherwise, is installed there; everything else comes from the environment that
this runs in, so that attncheck and the other frameworks are the same throughout.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attncheck.common.errors import AttncheckError, ExitCode
from attncheck.common.store import cache_folder, digest_of

_RELEASES_FOLDER = "releases"
_READY_FILE = "attncheck-ready"
"""A file that an environment has once it is complete."""
_MAX_REASON_LETTERS = 400


class ReleaseError(AttncheckError):
    """A release cannot be installed, or cannot run anything; the message has the reason."""


@dataclass(frozen=True)
class Release:
    """A version of a distribution, and further requirements that are installed with it."""

    distribution: str
    version: str
    extra_requirements: tuple[str, ...] = ()

    @property
    def requirements(self) -> list[str]:
        """The requirements that pip installs."""
        return [f"{self.distribution}=={self.version}", *self.extra_requirements]

    @property
    def folder(self) -> Path:
        """The folder of its environment, by the Python, the packages of this environment and the requirements."""
        made_of = digest_of(sys.version, _site_folders(), self.requirements)[:12]
        return cache_folder() / _RELEASES_FOLDER / f"{self.distribution}-{self.version}-{made_of}"

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ensure_release_installed(release: Release) -> bool:
    """Make the environment of a release, unless there is one; return whether it was made now. Raises ``ReleaseError``.

    pip's variables and configuration files apply: another index, a folder of wheels.
    """
    if (release.folder / _READY_FILE).exists():
        return False
    shutil.rmtree(release.folder, ignore_errors=True)
    try:
        venv.create(release.folder, symlinks=os.name != "nt")
        paths = {"base": str(release.folder), "platbase": str(release.folder)}
        packages = Path(sysconfig.get_path("purelib", "nt" if os.name == "nt" else "posix_prefix", vars=paths))
        packages.mkdir(parents=True, exist_ok=True)
        (packages / "attncheck-around.pth").write_text(
            "".join(f"import site; site.addsitedir({folder!r})\n" for folder in _site_folders()), encoding="utf-8"
        )
        command = [sys.executable, "-m", "pip", "--python", str(release.python), "install", "--quiet"]
        done = _run_subprocess([*command, "--disable-pip-version-check", *release.requirements])
    except OSError as error:
        raise ReleaseError(f"{release.distribution} {release.version}: no environment can be made: {error}") from None
    if done.returncode:
        shutil.rmtree(release.folder, ignore_errors=True)
        raise ReleaseError(
            f"{release.distribution} {release.version} cannot be installed: {_failure_reason(done.stderr)}"
        )
    (release.folder / _READY_FILE).touch()
    return True


def run_check_of_release(release: Release, arguments: Sequence[str], output: Path) -> None:
    """Run ``attncheck check`` in the environment of a release. Raises ``ReleaseError`` if it writes no results."""
    shutil.rmtree(output, ignore_errors=True)
    command = [str(release.python), "-m", "attncheck", "check", *arguments]
    done = _run_subprocess([*command, "--output", str(output), "--no-report", "--quiet"])
    if done.returncode == ExitCode.BAD_INPUT or not (output / "summary.json").is_file():
        raise ReleaseError(
            f"{release.distribution} {release.version} cannot be checked: {_failure_reason(done.stderr)}"
        )


def _run_subprocess(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def _failure_reason(printed: str) -> str:
    """Return the last line in which a command explains its failure."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "attncheck"))] or lines
    return (errors or ["it says nothing"])[-1][:_MAX_REASON_LETTERS]


def _site_folders() -> list[str]:
    """Return the package folders of the current environment."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]
