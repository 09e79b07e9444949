"""Results directories with something broken: in their bytes, their tables, their JSON, or what lies where.

A good one is written once by the writer itself, from rows and arrays that hold a little of everything.
"""

from __future__ import annotations

import io
import json
import os
import random
import tempfile
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import fuzz_mutations
import numpy as np

from attncheck.results.format import EXACT, INPUTS, Row, StoredArray, bound_array_name
from attncheck.results.writer import ResultsWriter, write_property_rows

Random = random.Random

_TEXTS = (
    *(
        "",
        "x",
        "../../etc/passwd",
        "/etc/passwd",
        "a\0b",
        "\x1b[31m",
        "<script>",
        "=1+1",
        "|",
        "`",
        "]]>",
        "\u202e",
        "日" * 300,
    ),
    *(
        "x" * 10_000,
        "0,0",
        "9" * 5000,
        "99999999999999999999",
        "-1",
        "1,,2",
        "numeric",
        "float64",
        "proven",
        "nan",
        "1x2",
        "%0A::",
    ),
)
_NUMBERS = (0, 1, -1, 2**31, 2**63 - 1, -(2**63), float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, None)
_WHOLE = (0, -1, 2**63 - 1, None)
_DTYPES = ("object", "O", "V8", "M8[s]", "float64,int8", "", "bfloat16", "U3", "complex128", "x" * 1000)
_NAMES = (
    *(
        "part-00001.npz",
        "part-x.npz",
        ".part-00000.npz.partial",
        "part-.npz",
        "part-00000.npz.gz",
        "part-00002.parquet",
    ),
    *("part-\ud800.npz", "part-\n.npz", "part-[red].npz", "part-99999999999999999999.npz", "part-00002.parquet"),
)


@cache
def pristine() -> Path:
    """Write a good results directory, once for each process, and return where."""
    directory = Path(tempfile.mkdtemp(prefix="attncheck-fuzz-")) / "pristine"
    writer = ResultsWriter(directory)
    rows, arrays = _rows(), _arrays()
    writer.write_json("environment.json", _environment())
    writer.write_json("cases.json", {"cases": [_case("file/one"), _case("file/two")]})
    for half in (0, 1):  # two parts of each kind
        writer.add_arrays(arrays[half::2])
        writer.add_rows(rows[half::2])
        writer.flush()
    write_property_rows(directory, _property_rows())
    writer.write_json("summary.json", {"exit_code": 1})
    scripts = directory / "scripts"
    scripts.mkdir()
    (scripts / "000.py").write_text("print('a script')\n", encoding="utf-8")
    (scripts / "index.json").write_text(json.dumps({"file/one|numpy.eager|float64": "000.py"}), encoding="utf-8")
    return directory


def _property_rows() -> list[Row]:
    row = Row("file/one", "softmax", "float64", "numpy.eager", "property", "weights", "broken", index="0,0,0,1")
    row = replace(row, property_name="repeated", variant="20 calls", value=0.25, reference=float("nan"), exact=0.2)
    row = replace(row, first_bound=0.01, second_bound=0.01, differing=1, elements=3, message="they differ")
    return [row, replace(row, verdict="within bounds", claim="bitwise"), replace(row, verdict="bitwise", index="")]


def _rows() -> list[Row]:
    rows = []
    for case in ("file/one", "file/two"):
        for name in ("numpy.eager", "torch.eager"):
            row = Row(case, "softmax", "float64", name, "stage", "weights", "agree", shape="1x1x1x3", elements=3)
            row = replace(row, index="0,0,0,1", value=0.25, reference=0.2, difference=0.05, allowed=0.5, ratio=0.1)
            rows += [replace(row, tier="within", introduced_tier="within", introduced_ratio=0.1, against="exact")]
            rows += [replace(row, verdict="numeric", ratio=2.0, tier="proven", stage="log_sum_exp", message="too far")]
            rows += [replace(row, verdict="numeric", xfail=True, dtype="float32", reason="it is so", thread="a/b#1")]
            rows += [replace(row, comparison="printed", reference_text="0.20", half_unit=0.005, called="w")]
            rows += [replace(row, comparison="pair", other="torch.eager" if name == "numpy.eager" else "numpy.eager")]
            rows += [Row(case, "softmax", "float32", name, "stage", "", "error", message="it raised")]
    return rows


def _arrays() -> list[StoredArray]:
    weights, bound = np.array([[[[0.2, 0.3, 0.5]]]]), np.full((1, 1, 1, 3), 0.01)
    kept = {"numpy.eager": weights, "torch.eager": weights + 0.1, EXACT: weights, bound_array_name("native"): bound}
    arrays = [
        StoredArray(case, "float64", name, "weights", array)
        for case in ("file/one", "file/two")
        for name, array in kept.items()
    ]
    return [*arrays, StoredArray("file/one", "float64", INPUTS, "scores", np.zeros((1, 1, 1, 3)))]


def _environment() -> dict[str, Any]:
    names = ("numpy.eager", "torch.eager")
    return {
        "label": "local",
        "command": "attncheck run",
        "python": "3.11.7",
        "platform": "Linux",
        "machine": "x86_64",
        "cpu_features": ["AVX2"],
        "processors": 2,
        "threads_per_worker": 1,
        "versions": {"numpy": "2.0", "torch": "2.5"},
        "flags": {"A": "b"},
        "byte_order": "little",
        "implementations": {name: name.partition(".")[0] for name in names},
        "classes": {name: {"float64": "native", "float32": "native"} for name in names},
        "left_out": {"jax": "not installed"},
        "missing": {},
        "faults": [],
    }


def _case(identity: str) -> dict[str, Any]:
    return {
        "id": identity,
        "name": "One case",
        "file": "file.yaml",
        "line": 7,
        "title": "A file",
        "source": {"kind": "document", "title": "A document", "notes": ["a note"]},
        "operation": "softmax",
        "options": {"window": [1, None]},
        "dtypes": ["float64"],
        "inputs": {"scores": [1, 1, 1, 3]},
        "tags": ["range"],
        "probes": {"range": {"probes": "the range", "defect": "overflow"}},
        "given": {"scores": {"called": "s", "printed": ["1", "2", "3"]}},
        "notes": ["a note"],
        "expected": [
            {"name": "weights", "of": "weights", "basis": "printed", "transpose": False, "shape": [1, 1, 1, 3]}
            | {"called": "w"}
        ],
    }


def damage(directory: Path, outside: Path, draw: Random) -> None:
    """Break one to three things of a results directory; ``outside`` is where links may lead."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        found = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
        change = draw.choice((_bytes, _bytes, _json, _json, _json, _table, _table, _table, _place))
        wanted = {_json: ".json", _table: ".npz"}.get(change)
        files = sorted(path for path in found if wanted in (None, path.suffix))
        if not files:
            return
        try:
            change(draw.choice(files), outside, draw)
        except Exception:
            continue  # it was broken already, or cannot be broken like this


def _bytes(path: Path, _: Path, draw: Random) -> None:
    others = [each.read_bytes() for each in sorted(path.parent.iterdir()) if each.is_file()] or [b""]
    path.write_bytes(fuzz_mutations.change_bytes(path.read_bytes(), others, draw))


def _json(path: Path, _: Path, draw: Random) -> None:
    content = json.loads(path.read_bytes())
    for _each in range(draw.choice((1, 1, 2))):
        content = fuzz_mutations.change_data(content, draw)
        if isinstance(content, dict) and draw.random() < 0.4:
            content = _with_text(content, draw)
    if draw.random() < 0.05:
        key = draw.choice(("options", "x", "flags"))
        value = draw.choice(("[" * 3000, "[" * 900 + "]" * 900, "9" * 5000))
        text = f'{json.dumps(content)[:-1]}, "{key}": {value}}}'
    else:
        text = json.dumps(content)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def _with_text(content: Any, draw: Random) -> Any:
    """Replace one text anywhere in JSON by another, half a surrogate pair among them."""
    slots = [(holder, key) for holder, key in fuzz_mutations.slots(content) if isinstance(holder[key], str)]
    if slots:
        holder, key = draw.choice(slots)
        holder[key] = draw.choice((*_TEXTS, "\ud800", "javascript:alert(1)"))
    return content


def _table(path: Path, _: Path, draw: Random) -> None:
    """Change the columns of a part, or the texts of one, or how it is packed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    arrays = {name: np.load(io.BytesIO(data)) for name, data in members.items() if name.endswith(".npy")}
    name = draw.choice(sorted(arrays) or [""])
    array = arrays.get(name, np.zeros(0))
    match draw.randrange(9):
        case 0:
            arrays.pop(name, None)
        case 1:
            arrays[name] = array.astype(draw.choice(("<i8", ">f8", "<f2", "?", "<U3", "S2", "<u1", "<c16")))
        case 2 | 3:
            words = draw.choice([other for other in arrays if other.endswith(".words.npy")] or [name])
            arrays[words] = np.frombuffer(_words(arrays[words].tobytes(), draw), np.uint8)
        case 4:
            values = array.copy()
            choices = _WHOLE if values.dtype.kind in "iu" else _NUMBERS
            for place in range(draw.randrange(max(1, len(values))), len(values)):
                values[place] = np.float64(draw.choice(choices) or 0).astype(values.dtype)
            arrays[name] = values
        case 5:
            arrays[name] = np.repeat(array, draw.choice((0, 2, 1000)))
        case 6:
            arrays = {key: np.concatenate([value] * draw.choice((2, 30))) for key, value in arrays.items()}
        case 7:
            arrays[name] = array.reshape(draw.choice(((-1, 1), (1, -1))))
        case 8:
            members |= {
                key: value[: draw.randrange(len(value) + 1)] for key, value in members.items() if "block" in key
            }
    method = draw.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(path, "w", method) as archive:
        for key, value in arrays.items():
            np.save(data := io.BytesIO(), value, allow_pickle=False)
            archive.writestr(key, data.getvalue())
        for key in set(members) - {key for key in members if key.endswith(".npy")}:
            archive.writestr(key, members[key])
        if draw.random() < 0.02:
            archive.writestr(name or "case.npy", bytes(2**28))  # a few kilobytes that are far more once they are read


def _words(data: bytes, draw: Random) -> bytes:
    """Change the different texts of a column."""
    words = json.loads(data)
    if not isinstance(words, list) or draw.random() < 0.1:
        return draw.choice((b"", b"{}", b"[[]]", b"[1]", b"[" * 5000, b'["\\ud800"]', b"\xff"))
    words[draw.randrange(len(words)) :] = [
        draw.choice((*_TEXTS, *_DTYPES, None)) for _ in range(draw.choice((0, 1, 3)))
    ]
    return json.dumps(words).encode()


def _place(path: Path, outside: Path, draw: Random) -> None:
    """Move, copy, remove or link a file."""
    target = path.with_name(draw.choice(_NAMES))
    match draw.randrange(8):
        case 0:
            path.unlink()
        case 1:
            path.rename(target)
        case 2:
            target.write_bytes(path.read_bytes())
        case 3:
            path.unlink()
            path.mkdir()
        case 4:
            path.unlink()
            path.symlink_to(draw.choice((Path("/dev/zero"), Path("/nonexistent"), path, outside, outside / "kept.txt")))
        case 5:
            path.unlink()
            os.mkfifo(path)
        case 6:
            report = next(each for each in path.parents if each.name == "run") / "report"
            if draw.random() < 0.5:
                report.symlink_to(outside)
            else:
                report.mkdir()
                name = draw.choice(("report.html", "report.md", "junit.xml", "results.csv", "results.parquet"))
                (report / name).symlink_to(draw.choice((outside / "kept.txt", outside / "new.txt", outside)))
        case 7:
            name = draw.choice(("../../outside/kept.txt", "/etc/passwd", "..", ".", "x\0"))
            run = next(each for each in path.parents if each.name == "run")
            index = {"file/one|numpy.eager|float64": name}
            (run / "scripts" / "index.json").write_text(json.dumps(index), encoding="utf-8")
