"""Vectors: what is written is read without attncheck, says what is exact and allowed, and outputs of it are judged."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from here import evaluation_here
from numpy.typing import NDArray

from attncheck import cli
from attncheck.backends import numpy_backend
from attncheck.common.errors import ResultsError, UsageError
from attncheck.interchange.vectors import RecordedOutputs, VectorsWriter, array_names, call_digest, read_lines

ROOT = Path(__file__).parents[3]
READERS = ROOT / "examples" / "vectors"
DTYPES = {
    **{name: np.dtype(name) for name in ("float64", "float32", "float16", "bool")},
    "bfloat16": ml_dtypes.bfloat16,
}


def export(folder: Path, *words: str) -> None:
    cli.app(["vectors", "export", str(folder), *words, "-q"], standalone_mode=False)


def verify(folder: Path, outputs: Path, output: Path, *words: str) -> int:
    """Judge outputs; return the exit code."""
    given = ["vectors", "verify", str(folder), *words, "--outputs", str(outputs), "-o", str(output)]
    with evaluation_here(), pytest.raises(SystemExit) as ended:
        cli.app(given, standalone_mode=True)
    return int(ended.value.code or 0)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "vectors.jsonl").read_text(encoding="utf-8").splitlines()]


def array_at(folder: Path, place: dict[str, Any], dtype: str, shape: list[int]) -> NDArray[Any]:
    """Read an array as a reader in any language does: so many bytes from there."""
    with (folder / "vectors.safetensors").open("rb") as file:
        file.seek(place["offset"])
        return np.frombuffer(file.read(place["bytes"]), DTYPES[dtype]).reshape(shape)


def computed(folder: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Compute attention of vectors that have query, key, value and a scale, in float64, rounded once."""
    for line in lines(folder):
        given = {each["name"]: array_at(folder, each["data"], each["dtype"], each["shape"]) for each in line["inputs"]}
        if set(given) != {"query", "key", "value"} or not line["options"].keys() <= {"scale", "is_causal"}:
            continue
        wide = {name: array.astype(np.float64) for name, array in given.items()}
        output = numpy_backend.attention(**wide, **line["options"])["output"]
        yield f"{line['id']}/{line['dtype']}/output", output.astype(DTYPES[line["dtype"]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors of the cases of attention."""
    found = tmp_path_factory.mktemp("vectors")
    export(found, "attention", "--dtype", "float32,float16,bfloat16")
    return found


def test_the_file_of_arrays_is_one_of_safetensors_and_a_call_is_recognised_by_its_bits_alone(folder: Path) -> None:
    with (folder / "vectors.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        numbers = file.read()
    ends = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    assert [first for first, _ in ends] == [0, *(end for _, end in ends[:-1])], "without gaps, as the format has it"
    assert ends[-1][1] == len(numbers)
    assert length % 8 == 0
    line = lines(folder)[0]
    place = line["inputs"][0]["data"]
    assert place["offset"] == 8 + length + header[place["tensor"]]["data_offsets"][0]
    assert place["offset"] % 8 == 0
    query = np.arange(6, dtype=np.float32).reshape(2, 3)
    one = call_digest("attention", {"window": (2, None)}, {"query": query})
    assert one == call_digest("attention", {"window": [2, None]}, {"query": np.asfortranarray(query)})
    assert one != call_digest("attention", {"window": (2, None)}, {"query": query.astype(np.float64)})
    assert one != call_digest("attention", {}, {"query": query})
    recorded = RecordedOutputs.__new__(RecordedOutputs)
    recorded._places = {}
    with pytest.raises(NotImplementedError, match="the case has changed since they were written"):
        recorded.stages_of_call("0")


def test_outputs_are_judged_and_what_is_not_there_is_unsupported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs, file = dict(computed(folder)), tmp_path / "outputs.npz"
    narrow = {name: array for name, array in outputs.items() if array.dtype == ml_dtypes.bfloat16}
    np.savez(file, **outputs | {name: array.view(np.uint16) for name, array in narrow.items()})
    assert verify(folder, file, tmp_path / "run", "attention") == 0
    out = capsys.readouterr().out
    assert "vectors.outputs agrees" in out
    assert "no output was handed in" in out
    assert (tmp_path / "run" / "report" / "report.html").is_file()
    name, wrong = next((name, array) for name, array in outputs.items() if array.itemsize == 4 and array.size > 4)
    wrong.flat[3] *= np.float32(1.01)
    np.savez(file, **{name: wrong})
    assert verify(folder, file, tmp_path / "run", "attention") == 1
    assert name.rpartition("/")[0].rpartition("/")[0] in capsys.readouterr().out
    with VectorsWriter.open(tmp_path / "mine") as writer:  # they may be safetensors, judged by the model that is named
        writer.add({}, narrow)
    file = tmp_path / "mine" / "vectors.safetensors"
    assert verify(folder, file, tmp_path / "run", "attention", "--rounding-model", "bfloat16=fused") == 0
    given = ["vectors", "verify", str(folder), "--outputs", str(file), "--rounding-model", "float32=fused"]
    with pytest.raises(UsageError, match="expected a dtype and one of its rounding models, as float16=fused"):
        cli.app(given, standalone_mode=False)


def test_what_cannot_be_read_is_said(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ResultsError, match=r"cannot be read.*; expected what `attncheck vectors export` wrote"):
        list(read_lines(tmp_path))
    for text, message in (
        ('{"attncheck_vectors":1,"id":"a"}\nnothing\n', "line 2: .*expected a line of vectors"),
        ('{"attncheck_vectors":2,"id":"a"}\n', "line 1: vectors of another version than 1"),
    ):
        (tmp_path / "vectors.jsonl").write_text(text, encoding="utf-8")
        with pytest.raises(ResultsError, match=message):
            list(read_lines(tmp_path))
    (tmp_path / "outputs.npz").write_bytes(b"no zip")
    for name, message in (
        ("outputs.txt", r"expected outputs in a file that ends with \.npz or \.safetensors"),
        ("outputs.npz", "cannot be read"),
    ):
        with pytest.raises(ResultsError, match=message):
            array_names(tmp_path / name)
    np.savez(tmp_path / "other.npz", nothing=np.zeros(1))
    for words, message in (
        (["attention", "--outputs", str(tmp_path / "other.npz")], "the outputs have no name of a stage of the vectors"),
        ([], "name the file of outputs with --outputs"),
    ):
        with pytest.raises(UsageError, match=message):
            cli.app(["vectors", "verify", str(folder), *words], standalone_mode=False)


@pytest.mark.parametrize(
    ("program", "cases", "most"),
    [("node", ("attention", "head_scale"), 20), ("cc", ("softmax", "values"), 5)],
    ids=["javascript", "c"],
)
def test_a_reader_in_another_language_finds_its_numbers_right(
    tmp_path: Path, program: str, cases: tuple[str, ...], most: int
) -> None:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"there is no {program}")
    command: list[str | Path] = [found, READERS / "read.mjs"]
    if program == "cc":
        command = [tmp_path / "read"]
        subprocess.run([found, "-O2", "-D_GNU_SOURCE", "-o", *command, READERS / "read.c", "-lm"], check=True)
    export(tmp_path, *cases, "--dtype", "float32,float64")
    ran = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(ran.stdout.split()[0]) > most
    # Every exact answer is made another, so that a reader that checks nothing is found out.
    with (tmp_path / "vectors.safetensors").open("r+b") as file:
        for line in lines(tmp_path):
            for stage in line["stages"]:
                exact = array_at(tmp_path, stage["exact"], "float64", stage["shape"]) + 1
                file.seek(stage["exact"]["offset"])
                file.write(exact.tobytes())
    assert subprocess.run([*command, tmp_path], capture_output=True, check=False).returncode == 1
