"""Builds the wheel that ``pyproject.toml`` describes, and parses the bundled cases for it.

A run without the parsed cases parses them itself, so a build in which they cannot be parsed (without the packages that
reading needs, as with ``--no-build-isolation``) gives a wheel that is slower the first time it is used.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithParsedCases(build_py):
    """Copies the packages, and writes ``attncheck/cases/parsed.zip`` from the copies."""

    def run(self) -> None:
        """Build, and parse the cases."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib).resolve()
        command = [sys.executable, "-m", "attncheck.reading.parse_corpus", folder / "attncheck/cases/parsed.zip"]
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        if subprocess.run(command, env=environment, check=False).returncode:
            self.warn("the bundled cases could not be parsed: the first run of the wheel parses them")


setup(cmdclass={"build_py": BuildWithParsedCases})
