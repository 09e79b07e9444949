"""The processors that a process may use: those that it was given, and what Linux says of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attncheck import processors
from attncheck.backends import BACKENDS
from attncheck.errors import UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.processors import (
    ISA,
    available_processors,
    emulation_variables,
    is_this_processor,
    limit_to_isa,
    processor_flags,
)

ASKED = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from attncheck.execution.call import Limits
from attncheck.processors import available_processors
print(available_processors(), Limits().workers >= 3)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform does not say which processors it gives")
def test_a_process_that_was_given_one_processor_counts_no_other() -> None:
    assert subprocess.check_output([sys.executable, "-c", ASKED], text=True) == "1 True\n"
    assert Limits().workers >= available_processors()


HASWELL = frozenset({"fpu", "sse4_1", "sse4_2", "avx", "avx2", "fma", "f16c"})
CASCADE_LAKE = HASWELL | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
SAPPHIRE_RAPIDS = CASCADE_LAKE | {"avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}


def on(monkeypatch: pytest.MonkeyPatch, flags: frozenset[str] | None, isa: str | None = None) -> None:
    monkeypatch.setattr(processors, "_own_flags", lambda: flags)
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    if isa is None:
        monkeypatch.delenv(ISA, raising=False)
    else:
        monkeypatch.setenv(ISA, isa)


def test_an_emulated_processor_has_the_flags_of_its_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa, flags in (("avx2", HASWELL), ("avx512", CASCADE_LAKE), (None, SAPPHIRE_RAPIDS)):
        on(monkeypatch, SAPPHIRE_RAPIDS, isa)
        assert processor_flags() == flags
    # A processor is the set of which it has all and nothing newer.
    for flags, found in ((HASWELL, ["avx2"]), (HASWELL | {"avx_vnni"}, []), (SAPPHIRE_RAPIDS - {"avx_vnni"}, ["amx"])):
        on(monkeypatch, flags)
        assert [isa for isa in processors.INSTRUCTION_SETS if is_this_processor(isa)] == found


def test_variables_of_an_instruction_set_leave_other_flags_for_xla_and_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, SAPPHIRE_RAPIDS)
    environment = {"XLA_FLAGS": "--xla_cpu_max_isa=AVX --xla_cpu_enable_fast_math=false"}
    limit_to_isa("sse4.1", environment)
    assert environment["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false --xla_cpu_max_isa=SSE4_2"
    assert environment["TF_ENABLE_ONEDNN_OPTS"] == "0"
    limit_to_isa("avx512_bf16", environment)  # oneDNN is on by default there
    assert "TF_ENABLE_ONEDNN_OPTS" not in environment
    assert emulation_variables() == {}
    limit_to_isa("avx2", environment := {})
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert emulation_variables() == environment


def test_what_a_processor_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = "this processor has no avx512_bf16, avx512_vnni, avx512bw, avx512cd, avx512dq, avx512f, avx512vl"
    nothing = "this processor has no flags that Linux would list in /proc/cpuinfo; it can be none"
    for isa, flags, said in (
        ("neon", SAPPHIRE_RAPIDS, "one of sse4.1, avx2, avx512, avx512_bf16, amx"),
        ("avx512_bf16", HASWELL, f"{lacks}; it can be sse4.1, avx2"),
        ("avx2", None, nothing),
    ):
        on(monkeypatch, flags)
        with pytest.raises(UsageError, match=re.escape(f"--isa {isa}: {said}")):
            limit_to_isa(isa, {})


TENSORFLOW = [
    (SAPPHIRE_RAPIDS, None, "eager"),
    (SAPPHIRE_RAPIDS, "0", "eager_cut"),
    (HASWELL, None, "eager_cut"),
    (HASWELL, "1", "eager_cut"),  # oneDNN has no bfloat16 there
    (HASWELL | {"avx512f"}, None, "eager_cut"),  # Skylake-X: oneDNN is off
    (HASWELL | {"avx512f"}, "1", "eager"),
    (HASWELL | {"avx_vnni"}, None, "eager_cut"),  # Alder Lake
    (HASWELL | {"avx_vnni", "avx_ne_convert"}, None, "eager"),  # Arrow Lake
    (None, None, "eager_cut"),
]


def test_tensorflow_cuts_products_off_where_onednn_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, switch, model in TENSORFLOW:
        on(monkeypatch, flags)
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
