"""Scripts that are run without attncheck, and kernels of somebody's that they call."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import yaml

from attncheck.execution.implementation_selection import find_implementation
from attncheck.execution.implementations import Implementation, make_user_entry
from attncheck.execution.user_code import Target
from attncheck.reading.case import Case
from attncheck.repro import repro_script

Done = subprocess.CompletedProcess[str]

KERNELS: dict[str, str] = yaml.load(
    Path(__file__).with_name("scripts.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader
)


def implementation(name: str) -> Implementation:
    """Find an implementation; one of somebody's own without a process that looks what it declares."""
    if not (name.endswith(".py") or ":" in name):
        return find_implementation(name)
    entry = make_user_entry(Target.parse(name), {}, None)
    (mode,) = entry.all_modes
    return Implementation(entry, mode)


FOREIGN = {"attncheck", "ml_dtypes", "flint", "pydantic", "ruamel", "pandas", "scipy"}


class Bench:
    """A folder with kernels of somebody's, and scripts that run there without what is ours."""

    def __init__(self, folder: Path, load_text: Callable[[str], list[Case]]) -> None:
        self.folder, self._load_text = folder, load_text
        self.right, self.wrong = (
            self.kernel(text, name)
            for text, name in ((KERNELS["right"], "right.py"), ("\n\n".join(KERNELS.values()), "wrong.py"))
        )

    def kernel(self, text: str, name: str = "kernel.py") -> str:
        """Write a file of somebody's own."""
        path = self.folder / name
        path.write_text(dedent(text), encoding="utf-8")
        return str(path)

    def case(self, operation: str, fields: str) -> Case:
        """Load a case from what a file says of it, below its operation; drawn inputs are drawn from one seed."""
        head = f"title: Scripts\nsource: {{kind: derivation, title: For the tests}}\noperation: {operation}\n"
        random = "random: {generator: numpy-legacy, seed: 5}\n"
        lines = "".join(f"    {line}\n" for line in (random + dedent(fields)).splitlines())
        return self._load_text(f"{head}cases:\n  - name: A case\n{lines}")[0]

    def run(self, text: str, its_own: Collection[str] = (), arguments: Sequence[str] = ()) -> Done:
        """Run a script where nothing of ours can be imported, nor what we need and NumPy does not."""
        path, out, err = self.folder / "report.py", io.StringIO(), io.StringIO()
        path.write_text(text, encoding="utf-8")
        code: object = 0
        before = dict(sys.modules)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err), np.errstate():
            patch.setattr(sys, "path", [str(self.folder), *sys.path])
            patch.setattr(sys, "argv", [str(path), *arguments])
            patch.chdir(self.folder)
            sys.modules.update(dict.fromkeys(FOREIGN - set(its_own)))  # type: ignore[arg-type] # None: not importable
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                code = 1
                err.write(traceback.format_exc())
            finally:
                # What a script loads of ours stays: another copy of it would have counts and caches of its own.
                for name in {name for name in {*sys.modules} - {*before} if not name.startswith("attncheck.")}:
                    del sys.modules[name]
                sys.modules.update(before)
        return Done([str(path)], int(code) if isinstance(code, int) else 1, out.getvalue(), err.getvalue())

    def run_in_a_process(self, text: str, its_own: Collection[str] = ()) -> Done:
        """Run a script so in a process of its own, which a framework needs: it cannot be imported twice."""
        path = self.folder / "report.py"
        path.write_text(text, encoding="utf-8")
        start = f"import runpy, sys\nsys.modules.update(dict.fromkeys({sorted(FOREIGN - set(its_own))}))\n"
        command = [sys.executable, "-c", f"{start}runpy.run_path({str(path)!r}, run_name='__main__')"]
        return subprocess.run(command, capture_output=True, text=True, cwd=self.folder, check=False)

    def reproduce(self, case: Case, name: str, dtype: str = "float32", its_own: Collection[str] = ()) -> Done:
        """Write a case's script, of all its stages and without a story, and run it."""
        return self.run(repro_script(case, implementation(name), dtype, (), "No story."), its_own)
