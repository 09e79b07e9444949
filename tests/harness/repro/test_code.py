"""Parts of our modules as code that stands alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attncheck.backends import EVERYTHING
from attncheck.repro.code import NotSeparable, copied, inlined, read_module


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Write a module that is taken for one of ours."""
    import attncheck

    monkeypatch.setattr(attncheck, "__path__", [*attncheck.__path__, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")

    yield write
    read_module.cache_clear()


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"SimpleNamespace": SimpleNamespace}
    exec(f"from __future__ import annotations\n{code}", names)
    return names


def test_what_is_used_comes_along_and_the_rest_stays_behind(module: Callable[[str, str], None]) -> None:
    module(
        "first",
        '"""First."""\nimport math\nimport os\n\nBASE = 2\n# Why it is doubled.\nDOUBLE = BASE * 2\n\n\n'
        "def unused():\n    return os.name\n\n\ndef root(number):\n    return math.sqrt(number * DOUBLE)\n",
    )
    module(
        "second",
        '"""Second."""\nfrom attncheck import first as whole\n'
        "from attncheck.first import DOUBLE as TWICE\n"
        "\n\ndef root(number):\n    return whole.root(number) + TWICE\n",
    )
    code = inlined("attncheck.second", {"root"})
    assert run(code)["second"].root(4) == 8.0
    assert "os" not in code.replace("cos", "").split()
    assert "unused" not in code
    assert "# Why it is doubled." in code
    assert "attncheck" not in code


def test_names_that_two_modules_share_do_not_meet(module: Callable[[str, str], None]) -> None:
    module("first", "def helper():\n    return 1\n\n\ndef told():\n    return helper()\n")
    module(
        "second",
        "from attncheck.first import told\n\n\ndef helper():\n    return 2\n\n\ndef both():\n"
        "    return told(), helper()\n",
    )
    assert run(inlined("attncheck.second", ["both"]))["second"].both() == (1, 2)


@pytest.mark.parametrize("statement", ["print('hello')", "from os import *"])
def test_a_module_that_does_more_than_define_is_refused(statement: str, module: Callable[[str, str], None]) -> None:
    module("first", f"{statement}\n\n\ndef told():\n    return 1\n")
    with pytest.raises(NotSeparable, match="first, line 1"):
        inlined("attncheck.first", ["told"])


def test_functions_are_copied_as_they_stand() -> None:
    code = copied("attncheck.repro.parts", {"unpack"})
    assert code.startswith("import base64\nimport zlib\n")
    assert "def run(" not in code
    assert run(f"Any = None\n{code}")["unpack"]("float64", (0,), "eJwDAAAAAAE=").shape == (0,)


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_mode_of_every_backend_can_be_taken_apart(name: str) -> None:
    for mode in EVERYTHING[name].all_modes.values():
        names = {"prepare", "from_numpy", "to_numpy"} if mode.attribute is None else {mode.attribute}
        code = inlined(mode.module, names)
        compile(code, mode.module, "exec")
        assert "attncheck." not in code
