"""JAX's compiled programs, kept between processes: what is read back is what would be compiled, or it is compiled."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.jax

Arrays = dict[str, Any]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, keeping programs in a folder of the test's."""
    pytest.importorskip("jax", reason="jax is not installed")
    module = importlib.import_module("attncheck.backends.jax_jit")
    monkeypatch.setenv(module.PROGRAM_FOLDER_VARIABLE, str(tmp_path / "programs"))
    yield module, tmp_path / "programs"
    module._program_folder.cache_clear()
    module._origin_digest.cache_clear()


def counting() -> tuple[Callable[..., Arrays], list[str]]:
    """Return a function that is the same in every process, and what each of its tracings saw."""
    import jax.numpy as jnp

    traced: list[str] = []

    def weigh(scores: Any, *, power: int = 1, bias: Any = None) -> Arrays:
        traced.append(f"{scores.shape} {scores.dtype} {power}")
        weights = jnp.exp(scores) ** power
        return {"weights": weights if bias is None else weights + bias}

    return weigh, traced


def scores(*shape: int, dtype: str = "float32") -> Any:
    import jax.numpy as jnp

    return jnp.asarray(np.random.RandomState(1).randn(*shape).astype(dtype))


def anew(programs: Any) -> tuple[Callable[..., Arrays], list[str]]:
    """Return the function as another process has it, which has nothing loaded."""
    module, _ = programs
    for cached in (module._program_folder, module._origin_digest):
        cached.cache_clear()
    function, traced = counting()
    return module.compile_and_keep(function, {"power"}), traced


def test_a_damaged_entry_or_one_for_other_arrays_is_compiled_anew_and_replaced(programs: Any) -> None:
    first, _ = anew(programs)
    expected = np.asarray(first(scores(3, 4))["weights"])
    (entry,) = programs[1].iterdir()
    first(scores(2, 2))
    (other,) = (path for path in programs[1].iterdir() if path != entry)
    whole = entry.read_bytes()
    for damage in (b"", b"nothing", whole[: len(whole) // 2], other.read_bytes()):
        entry.write_bytes(damage)
        second, traced = anew(programs)
        assert np.array_equal(np.asarray(second(scores(3, 4))["weights"]), expected)
        assert len(traced) == 1
    before = programs[0].programs_compiled
    third, traced = anew(programs)
    third(scores(3, 4))
    assert (traced, programs[0].programs_compiled) == ([], before)
    third(scores(4, 4))
    assert programs[0].programs_compiled == before + 1


@pytest.mark.parametrize("change", ["settings", "flags", "framework"])
def test_what_programs_follow_from(change: str, programs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import jax

    anew(programs)[0](scores(3, 4))
    before = jax.config.values["jax_default_matmul_precision"]
    if change == "settings":
        jax.config.update("jax_default_matmul_precision", "highest")
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    else:
        (tmp_path / "__init__.py").write_text("")
        monkeypatch.setattr("jaxlib.__file__", str(tmp_path / "__init__.py"))
    again, traced = anew(programs)
    try:
        again(scores(3, 4))
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert len(traced) == 1


def test_what_is_no_array_of_jax_is_left_to_jax_and_nothing_is_kept_without_a_place(programs: Any) -> None:
    import jax

    function, traced = anew(programs)
    assert function(np.ones((2, 2), "float32"))["weights"].shape == (2, 2)
    assert len(traced) == 1
    assert not programs[1].exists()
    before = jax.config.values["jax_enable_compilation_cache"]
    anew(programs)[0](scores(3, 4))
    assert jax.config.values["jax_enable_compilation_cache"] == before  # JAX's own cache is on again behind it
    shutil.rmtree(programs[1])
    programs[1].write_text("a file")
    function, _ = anew(programs)
    assert function(scores(2, 3))["weights"].shape == (2, 3)


def test_what_was_not_used_for_the_longest_time_makes_room(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, folder = programs
    folder.mkdir()
    for number in range(6):
        (folder / str(number)).write_bytes(bytes(100))
        os.utime(folder / str(number), (1e9 - number, 1e9 - number))
    monkeypatch.setattr(module, "MAX_BYTES", 600)
    module._remove_old_programs(folder)
    assert len(list(folder.iterdir())) == 6
    monkeypatch.setattr(module, "MAX_BYTES", 500)
    module._remove_old_programs(folder)
    assert {path.name for path in folder.iterdir()} == {"0", "1"}


def test_no_program_follows_from_a_file_that_is_not_looked_at(programs: Any) -> None:
    module, _ = programs
    looked_at = {f"attncheck.backends.{path.stem}" for path in module.source_files()}
    assert {"attncheck.backends.jax_backend", "attncheck.backends.contract"} <= looked_at
    for path in module.source_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attncheck"):
                assert node.module is not None
                names = (f"{node.module}.{each.name}" for each in node.names)
                assert all(name in looked_at or node.module in looked_at for name in names), path.name


def test_what_one_process_compiled_the_next_one_reads_and_another_call_or_wrapper_is_another_program(
    programs: Any,
) -> None:
    module, folder = programs
    first, traced = anew(programs)
    expected = first(scores(3, 4), power=2)["weights"]
    assert len(traced) == 1
    second, traced = anew(programs)
    assert np.asarray(second(scores(3, 4), power=2)["weights"]).tobytes() == np.asarray(expected).tobytes()
    assert traced == []
    calls: list[tuple[tuple[int, int], str, dict[str, Any]]] = [
        ((4, 3), "float32", {"power": 2}),
        ((3, 4), "float32", {"power": 3}),
        ((3, 4), "float32", {}),
        ((3, 4), "float32", {"power": 2, "bias": scores(3, 4)}),
        ((3, 4), "float16", {"power": 2}),
    ]
    for count, (shape, dtype, options) in enumerate(calls):
        another, traced = anew(programs)
        found = another(scores(*shape, dtype=dtype), **options)["weights"]
        assert len(traced) == 1, options
        assert (found.shape, found.dtype) == (shape, dtype)
        assert len(list(folder.iterdir())) == count + 2
    function, _ = counting()

    @wraps(function)
    def doubled(*inputs: Any, **options: Any) -> Arrays:
        return {"doubled": 2 * function(*inputs, **options)["weights"]}

    before = len(list(folder.iterdir()))
    assert {*module.compile_and_keep(doubled, {"power"})(scores(3, 4))} == {"doubled"}
    assert len(list(folder.iterdir())) == before + 1
