"""Environments of a run: the processors that it may use and emulate, and old releases with the rest around them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import pytest
from tables import tables_beside

from attncheck.backends import BACKENDS
from attncheck.common import processors
from attncheck.common.errors import UsageError
from attncheck.common.processors import ISA_VARIABLE, available_processors, limit_to_isa
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.reports.difference import Bisection, bisection_lines, read_frames
from attncheck.reports.terminal import print_lines

ASKED = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from attncheck.execution.call import Limits
from attncheck.common.processors import available_processors
print(available_processors(), Limits().workers >= 3)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform does not say which processors it gives")
def test_a_process_that_was_given_one_processor_counts_no_other() -> None:
    assert subprocess.check_output([sys.executable, "-c", ASKED], text=True) == "1 True\n"
    assert Limits().workers >= available_processors()


HASWELL = frozenset({"fpu", "sse4_1", "sse4_2", "avx", "avx2", "fma", "f16c"})
TEXTS = tables_beside(__file__)["environments"]


def on(monkeypatch: pytest.MonkeyPatch, flags: frozenset[str] | None, isa: str | None = None) -> None:
    monkeypatch.setattr(processors, "_read_processor_flags", lambda: flags)
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    if isa is None:
        monkeypatch.delenv(ISA_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(ISA_VARIABLE, isa)


def test_what_a_processor_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = "this processor has no avx512_bf16, avx512_vnni, avx512bw, avx512cd, avx512dq, avx512f, avx512vl"
    nothing = "this processor has no flags that Linux would list in /proc/cpuinfo; it can be none"
    for isa, flags, said in (
        ("neon", HASWELL, "one of sse4.1, avx2, avx512, avx512_bf16, amx"),
        ("avx512_bf16", HASWELL, f"{lacks}; it can be sse4.1, avx2"),
        ("avx2", None, nothing),
    ):
        on(monkeypatch, flags)
        with pytest.raises(UsageError, match=re.escape(f"--isa {isa}: {said}")):
            limit_to_isa(isa, {})


def test_tensorflow_cuts_products_off_where_onednn_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, switch, model in TEXTS["tensorflow"]:
        on(monkeypatch, None if flags is None else HASWELL.union(flags))
        if switch:
            monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", switch)
        assert Implementation(BACKENDS["tensorflow"]).rounding_model("bfloat16") == model, (flags, switch)
    others = (("tensorflow", "eager", "float16"), ("tensorflow", "xla", "bfloat16"), ("torch", "eager", "bfloat16"))
    assert {Implementation(BACKENDS[name], mode).rounding_model(dtype) for name, mode, dtype in others} == {"eager"}
    assert Implementation(BACKENDS["tensorflow"]).rounding_model("float32") == "native"


@pytest.mark.skipif("sse4.1" not in processors.isas_of_this_processor(), reason="this is no x86 processor on Linux")
def test_a_check_under_an_instruction_set_says_so_in_its_results(tmp_path: Path) -> None:
    asked = "check attention/a-causal-row-sees* -b numpy -d float32 --no-report --isa sse4.1"
    done = subprocess.run([sys.executable, "-m", "attncheck", *asked.split(), "-o", str(tmp_path)], capture_output=True)
    assert done.returncode == 0, done.stderr
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["isa"] == "sse4.1"
    assert environment["flags"]["OPENBLAS_CORETYPE"] == "Nehalem"
    assert not [feature for feature in environment["cpu_features"] if "AVX" in feature or feature == "X86_V3"]
    assert environment["again"]["numpy.eager"] == ["numpy.eager", "--isa", "sse4.1"]


Invoke = Callable[..., tuple[int, str, str]]

# To import pip, or to look where it is, would take setuptools' distutils from other tests of this process.
needs_pip = pytest.mark.skipif(not list(distributions(name="pip")), reason="pip is not there to install releases with")


RIGHT = "np.tri(*scores.shape[-2:], dtype=bool)"
WRONG = "np.tri(*scores.shape[-2:], k=1, dtype=bool)"


def write_wheel(folder: Path, version: str, source: str) -> None:
    info = f"toy_attention-{version}.dist-info"
    with zipfile.ZipFile(folder / f"toy_attention-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy_attention.py", source)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy-attention\nVersion: {version}\n")
        tags = "Generator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\n{tags}")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of wheels that pip installs from, and a cache of these tests' own."""
    folder = tmp_path_factory.mktemp("wheels")
    for version, allowed in (("1.0", RIGHT), ("1.1", WRONG), ("2.0", RIGHT)):
        write_wheel(folder, version, TEXTS["attend"].format(allowed=allowed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        patch.setenv("ATTNCHECK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture
def bisected(wheels: Path, tmp_path: Path, invoke: Invoke) -> Invoke:
    """Bisect a kernel that calls what is installed; return exit code, standard output and standard error."""
    (tmp_path / "kernel.py").write_text(TEXTS["kernel"], encoding="utf-8")
    (tmp_path / "small.yaml").write_text(TEXTS["cases"], encoding="utf-8")
    return partial(invoke, "bisect", "kernel.py:attention", "small.yaml")


@needs_pip
def test_it_says_which_release_changed_which_verdict(bisected: Invoke, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = bisected("--package", "toy-attention", "--versions", "1.0,1.1,2.0", "-d", "float64", "--json")
    assert code == 1, err
    found = json.loads(out)
    assert found["missed"] == {}
    columns = ("release", "right", "failing", "worse", "better")
    assert [tuple(row[column] for column in columns) for row in found["releases"]] == [
        ("1.0", 2, 0, None, None),
        ("1.1", 1, 1, 1, 0),
        ("2.0", 2, 0, 0, 1),
    ]
    changes = [
        (step["before"], step["after"], [(row["change"], row["case"]) for row in step["verdicts"]])
        for step in found["steps"]
    ]
    assert changes == [("1.0", "1.1", [("worse", "small/causal")]), ("1.1", "2.0", [("better", "small/causal")])]
    read = Bisection("toy-attention")
    for version in ("1.0", "1.1"):
        read.add(version, read_frames(Path("results/bisect") / version))
    print_lines(bisection_lines(read))
    text = capfd.readouterr().out
    assert "toy-attention 1.1 changed, against 1.0:" in text
    assert "small/causal" in text
    assert "right" in text.splitlines()[0]


@needs_pip
def test_a_release_that_cannot_be_installed_is_said_and_the_others_are_compared(bisected: Invoke) -> None:
    code, out, err = bisected("--package", "toy-attention", "--versions", "1.0,1.5,2.0", "-d", "float64")
    assert (code, "Traceback" in err) == (3, False)
    assert "toy-attention 1.5 cannot be installed: ERROR: No matching distribution found" in out
    assert "No release changed a verdict." in out
    for versions, message in (
        ("1.0", "--versions: expected at least two releases, such as --versions 1.0,1.1,2.0"),
        ("1.0,2.0", "--package: expected the distribution whose releases kernel.py:attention is run"),
    ):
        code, _, err = bisected("--versions", versions)
        assert (code, message in err) == (2, True)
