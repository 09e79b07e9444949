"""What a small run loads: somebody who looks at a few cases again waits for little else than imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from attncheck.common.store import CACHE_VARIABLE

MOST_MODULES = 150
"""Of this package, in the process that was started."""

RUN = """\
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules))))
sys.argv = ["attncheck", "check", "attention/[a-l]*", "-b", "numpy", "--dtype", "float32", "-q", *sys.argv[1:]]
from attncheck.cli import main
main()
"""


def test_a_few_cases_again_load_little(tmp_path: Path) -> None:
    for _ in range(2):
        loaded = loaded_modules(tmp_path)
        assert "attncheck.diagnosis.readings" not in loaded, "the verdict of what is right needs no reading"
    own = [name for name in loaded if name.split(".")[0] == "attncheck"]
    assert len(own) <= MOST_MODULES, sorted(own)
    assert not loaded & {"flint", "matplotlib", "attncheck.judging.judge", "torch", "jax", "tensorflow", "dask"}
    assert not loaded_modules(tmp_path, "--no-report") & {"pandas", "pyarrow"}, "there is nothing to print"


def loaded_modules(folder: Path, *words: str) -> set[str]:
    """Return the modules that a run in a folder loads, with words after its command."""
    environment = {**os.environ, CACHE_VARIABLE: str(folder / "cache")}
    command = [sys.executable, "-c", RUN, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_imports_nothing_that_takes_long() -> None:
    code = (
        "import sys; sys.argv = ['attncheck', '--help']\n"
        "from attncheck.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    slow = {'numpy', 'pandas', 'pyarrow', 'pydantic', 'torch', 'tensorflow', 'jax'}\n"
        "    print(end.code, sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_suite_of_others_that_asks_for_nothing_loads_nothing_heavy(tmp_path: Path) -> None:
    heavy = "import sys\n\ndef test_it():\n    assert not {'pandas', 'flint', 'pydantic'} & set(sys.modules)\n"
    (tmp_path / "test_other.py").write_text(heavy, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout
