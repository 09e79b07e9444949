"""Arrays in files beside a case file, and cases that are kept: read back as they were, or refused in words."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tables import CASES, tables_beside

from attncheck.common.errors import AttncheckError, CaseError, Diagnostic
from attncheck.common.store import Store, UnreadableEntry, digest_of
from attncheck.reading import case as case_module
from attncheck.reading import stored_arrays
from attncheck.reading.case import Case, PackedCases, deserialize_cases, load_cached_case_file, serialize_cases
from attncheck.reading.inputs import make_exact_inputs, make_inputs
from attncheck.reading.loader import load_case_file
from attncheck.reading.selection import CaseSelection, select_cases

HEAD = CASES["head of softmax"] + "  - name: The case at hand\n    inputs: {scores: SCORES}\n"
TABLES = tables_beside(__file__)
NUMBERS = np.array([[1.0, -2.5, 3], [0, 1e-3, 7]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cases"
    folder.mkdir()
    np.savez(folder / "dump.npz", scores=NUMBERS, other=NUMBERS[:1])
    np.save(folder / "dump.npy", NUMBERS)
    return folder


def select(folder: Path, scores: str, store: Store | None = None) -> CaseSelection:
    (folder / "file.yaml").write_text(HEAD.replace("SCORES", scores), encoding="utf-8")
    return select_cases(["file.yaml"], base=folder, **({"store": store} if store else {}))


def read(folder: Path, scores: str, store: Store | None = None) -> Case:
    selection = select(folder, scores, store)
    if selection.faults:
        raise CaseError(list(selection.faults))
    [case] = selection.cases
    return case


def made(case: Case) -> NDArray[Any]:
    array: NDArray[Any] = make_exact_inputs(case)["scores"].array
    return array[0, 0]


def fault(folder: Path, scores: str) -> Diagnostic:
    [found] = select(folder, scores).faults
    assert (found.line, found.case) == (6, "The case at hand")
    assert str(found).isprintable()
    return found


def _floats(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [begin, end]}


def safetensors(arrays: dict[str, tuple[str, list[int], bytes]], **header: Any) -> bytes:
    """Write the format by hand, as its description says."""
    entries, numbers = dict[str, Any](header), b""
    for name, (dtype, shape, data) in arrays.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(numbers), len(numbers) + len(data)]}
        numbers += data
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + numbers


SAFETENSORS: dict[str, Any] = {
    **{"BOOL": bool, "U8": "u1", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": ml_dtypes.bfloat16},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2},
}


def test_numbers_of_every_dtype_are_read_from_beside_the_case_file_or_below(folder: Path) -> None:
    case = read(folder, "{file: ./dump.npy}")
    np.testing.assert_array_equal(made(case), NUMBERS)
    assert not case.supports_statistics
    (folder / "below").mkdir()
    np.save(folder / "below" / "x.npy", np.asfortranarray(NUMBERS.astype(">f4")))
    case = read(folder, "{file: below/x.npy, rows: [1], transpose: true, times: 2}")
    np.testing.assert_array_equal(made(case), 2 * NUMBERS.astype("f4").astype(float)[1:].T)
    for dtype in ("bool", "int8", "uint16", "int64", "float16", "float32", "float64"):
        array = np.array([[0, 1, 1]], dtype)
        np.save(folder / f"{dtype}.npy", array)
        np.savez_compressed(folder / f"{dtype}.npz", array)
        for source in (f"{{file: {dtype}.npy}}", f"{{file: {dtype}.npz, name: arr_0}}"):
            np.testing.assert_array_equal(made(read(folder, source)), array)
    for name, dtype in SAFETENSORS.items():
        array = np.array([[0, 1, 1], [1, 0, 1.5]]).astype(dtype)
        data = {"before": ("U8", [3], b"abc"), "x": (name, [2, 3], array.tobytes())}
        (folder / f"{name}.safetensors").write_bytes(safetensors(data, __metadata__={"format": "pt"}))
        found = made(read(folder, f"{{file: {name}.safetensors, name: x}}"))
        np.testing.assert_array_equal(found, array.astype(float))


def test_a_mask_and_counts_may_lie_in_files(folder: Path) -> None:
    np.savez(folder / "x.npz", mask=np.tri(2, 3, dtype=bool), lengths=np.array([2]), half=np.array([0.5, 1, 1]))
    text = "{file: dump.npy}, mask: {file: x.npz, name: MASK}, key_lengths: {file: x.npz, name: lengths}}\n"
    text += "    operation: masking\n    options: {"
    [found] = select(folder, text.replace("MASK", "mask")).cases
    inputs = make_inputs(found, "float32").arrays
    assert inputs["mask"].dtype == bool
    np.testing.assert_array_equal(inputs["mask"][0, 0], np.tri(2, 3, dtype=bool))
    assert inputs["key_lengths"].tolist() == [2]
    wrong = fault(folder, text.replace("MASK", "half"))
    assert (wrong.field, wrong.message) == ("inputs.mask.file", "a mask is boolean (true = may attend), got 0.5")


def test_the_checksum_of_the_whole_file_is_held(folder: Path) -> None:
    found = hashlib.sha256((folder / "dump.npz").read_bytes()).hexdigest()
    np.testing.assert_array_equal(made(read(folder, f"{{file: dump.npz, name: scores, sha256: '{found}'}}")), NUMBERS)
    wrong = fault(folder, f"{{file: dump.npz, name: scores, sha256: '{'0' * 64}'}}")
    assert wrong.field == "inputs.scores.sha256"
    assert wrong.message == f"dump.npz has the checksum {found}; it is another file, or was changed"


def _zip(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


def _npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def _header(shape: tuple[int, ...], dtype: str = "<f8") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


class _Opens:
    """What would write a file if it were unpickled."""

    def __reduce__(self) -> Any:
        return open, ("pwned", "w")


WHOLE = _npy(NUMBERS)
FILES: dict[str, tuple[bytes, str, str, str]] = {
    # of a file: its bytes, its description, the field at fault, what is said
    "none.npy": (b"", "", "file", "is damaged or incomplete"),
    "text.npy": (b"1 2 3\n", "", "file", "is damaged or incomplete"),
    "short.npy": (WHOLE[:-8], "", "file", "is damaged or incomplete: the numbers have 40 bytes; expected 48"),
    "long.npy": (WHOLE + b"x", "", "file", "is damaged or incomplete: the numbers have 49 bytes; expected 48"),
    "huge.npy": (_header((2**40, 2**40)), "", "file", "numbers; expected at most 67108864"),
    "negative.npy": (_header((-1,)), "", "file", "damaged or incomplete"),
    "objects.npy": (
        _npy(np.array([_Opens()], object)),
        "",
        "file",
        "has Python objects, which attncheck never unpickles",
    ),
    "pickle.npy": (pickle.dumps([_Opens()]), "", "file", "damaged or incomplete"),
    "text_array.npy": (_npy(np.array(["a"])), "", "file", "expected numbers of at most 64 bits or booleans, got <U1"),
    "complex.npy": (_npy(np.array([1j])), "", "file", "expected numbers of at most 64 bits or booleans, got complex"),
    "bfloat16.npy": (
        _npy(np.array([1.0]).astype(ml_dtypes.bfloat16)),
        "",
        "file",
        "got |V2; NumPy forgets bfloat16, so store float32, or safetensors",
    ),
    "large_whole.npy": (_npy(np.array([2**53 + 2])), "", "file", "has a whole number beyond 9007199254740992"),
    "named.npy": (WHOLE, ", name: x", "name", "a .npy file has one array without a name; leave the name out"),
    "nan.npy": (_npy(np.array([np.nan])), "", "file", "NaN is not allowed here"),
    "six.npy": (_npy(np.zeros((1, 1, 1, 1, 1, 1))), "", "", "expected at most 5 axes, got 6"),
    "unnamed.npz": (_zip(a=WHOLE, b=WHOLE), "", "", "say which array of the file: expected one of a, b"),
    "absent.npz": (_zip(a=WHOLE), ", name: c", "name", "the file has no array 'c'; expected one of a"),
    "no.npz": (b"PK no archive", ", name: a", "file", "is damaged or incomplete: File is not a zip file"),
    "cut.npz": (_zip(a=WHOLE)[:-9], ", name: a", "file", "is damaged or incomplete"),
    "flipped.npz": (
        _zip(a=WHOLE)[:60] + bytes(3) + _zip(a=WHOLE)[63:],
        ", name: a",
        "file",
        "is damaged or incomplete",
    ),
    "bomb.npz": (_zip(a=bytes(2**20)), ", name: a", "file", "would unpack to 1048576 bytes; expected at most"),
    "empty.safetensors": (
        b"",
        ", name: a",
        "file",
        "is damaged or incomplete: the header has 0 bytes, and the file has 0",
    ),
    "header.safetensors": (b"\xff" * 16, ", name: a", "file", "damaged or incomplete: the header has 184467440"),
    "list.safetensors": ((2).to_bytes(8, "little") + b"[]", ", name: a", "file", "the header is not a mapping"),
    "entry.safetensors": (safetensors({}, a={"dtype": "F32"}), ", name: a", "file", "lacks dtype, shape or data"),
    "overlap.safetensors": (
        safetensors({}, a=_floats(0, 8), b=_floats(4, 12)) + bytes(12),
        ", name: a",
        "file",
        "an array begins at byte 4 of the numbers; expected 8, where the last ends",
    ),
    "gap.safetensors": (safetensors({}, a=_floats(4, 12)) + bytes(12), ", name: a", "file", "begins at byte 4"),
    "rest.safetensors": (safetensors({}, a=_floats(0, 8)) + bytes(12), ", name: a", "file", "end at byte 8 of 12"),
    "twice.safetensors": (
        (14).to_bytes(8, "little") + b'{"a":1, "a":2}',
        ", name: a",
        "file",
        "the header has a name twice",
    ),
    "offsets.safetensors": (
        safetensors({"a": ("F32", [3], bytes(8))}),
        ", name: a",
        "file",
        "the array is at bytes 0 to 8 of 8; expected 12 bytes",
    ),
    "other.safetensors": (
        safetensors({"a": ("F4", [1], b"x")}),
        ", name: a",
        "file",
        "has dtype F4; expected one of BOOL",
    ),
    "shape.safetensors": (safetensors({"a": ("U8", [-1], b"x")}), ", name: a", "file", "list of whole numbers"),
    "large.safetensors": (safetensors({"a": ("U8", [2**30], b"")}), ", name: a", "file", "expected at most 67108864"),
    "x.txt": (b"1", "", "file", "expected a file that ends with one of .npy, .npz, .safetensors, got 'x.txt'"),
}


def test_what_is_wrong_with_a_file_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _zip(a=bytes(4096))
    place = data.rindex(b"PK\x01\x02")  # the entry of the directory, whose size is written over
    liar = data[: place + 24] + (8).to_bytes(4, "little") + data[place + 28 :]
    for name, (data, more, field, message) in (FILES | {"liar.npz": (liar, ", name: a", "file", "damaged")}).items():
        (folder / name).write_bytes(data)
        with monkeypatch.context() as patch:
            if name in ("bomb.npz", "liar.npz"):
                patch.setattr(stored_arrays, "MAX_STORED_NUMBERS", 16)
                patch.setattr(stored_arrays, "_MAX_HEADER_BYTES", 100)
            found = fault(folder, f"{{file: {name}{more}}}")
        assert found.field == f"inputs.scores{'.' if field else ''}{field}"
        assert message in found.message
        assert not (folder / "pwned").exists()
        assert not Path("pwned").exists()
    np.save(folder.parent / "outside.npy", NUMBERS)
    (folder / "link.npy").symlink_to(folder.parent / "outside.npy")
    for name in ("folder.npy", "below"):
        (folder / name).mkdir()
    for file, message in TABLES["elsewhere"].items():
        found = fault(folder, f"{{file: {file}}}")
        assert (found.field, message in found.message) == ("inputs.scores.file", True), file
    monkeypatch.setattr(stored_arrays, "MAX_FILE_BYTES", 100)
    assert fault(folder, "{file: dump.npy}").message == "dump.npy has 176 bytes; expected at most 100"


def test_another_content_is_another_case_and_a_file_read_before_is_read_again(folder: Path, tmp_path: Path) -> None:
    store, of_npz = Store(tmp_path / "store"), read(folder, "{file: dump.npz, name: scores}")
    first = read(folder, "{file: dump.npy}", store)
    again = read(folder, "{file: dump.npy}", store)
    assert again.digest == first.digest
    np.save(folder / "dump.npy", 2 * NUMBERS)
    changed = read(folder, "{file: dump.npy}", store)
    assert changed.digest != first.digest
    np.testing.assert_array_equal(made(changed), 2 * NUMBERS)
    with pytest.raises(AttncheckError, match=r"dump.npy has changed since its case was read"):
        make_exact_inputs(first)
    (folder / "dump.npy").unlink()
    with pytest.raises(CaseError, match=r"there is no file 'dump\.npy'"):
        read(folder, "{file: dump.npy}", store)

    np.savez(folder / "dump.npz", scores=NUMBERS, new=NUMBERS)  # what else a file holds does not change the case
    assert read(folder, "{file: dump.npz, name: scores}").digest == of_npz.digest
    np.testing.assert_array_equal(made(of_npz), NUMBERS)


def test_a_case_with_stored_arrays_can_be_packed_and_kept(folder: Path) -> None:
    case = read(folder, "{sum: [{file: dump.npz, name: other}, {constant: 1, shape: [2, 3]}]}")
    [packed] = PackedCases([case])
    [kept] = deserialize_cases(serialize_cases([case]))
    for other in (packed, kept, pickle.loads(pickle.dumps(case))):
        assert other.digest == case.digest
        np.testing.assert_array_equal(made(other), np.broadcast_to(NUMBERS[:1] + 1, (2, 3)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), suffix=st.sampled_from(["npy", "npz", "safetensors"]), place=st.integers(0, 300))
def test_any_bytes_are_read_or_refused(folder: Path, data: bytes, suffix: str, place: int) -> None:
    whole = {"npy": WHOLE, "npz": _zip(a=WHOLE), "safetensors": safetensors({"a": ("F64", [2, 3], NUMBERS.tobytes())})}
    (folder / f"x.{suffix}").write_bytes(whole[suffix][:place] + data + whole[suffix][place + len(data) :])
    name = "" if suffix == "npy" else ", name: a"
    selection = select(folder, f"{{file: x.{suffix}{name}}}")
    fields = {found.field for found in selection.faults}
    assert fields <= {f"inputs.scores{at}" for at in ("", ".file", ".name")}
    for case in selection.cases:
        assert made(case).dtype == np.float64


def load_expecting(folder: Path, printed: str, more: str = "", store: Store | None = None) -> Case:
    """Read attention of three unit vectors, of which numbers in a file are expected."""
    text = HEAD.replace("softmax", "attention").replace("scores: SCORES", "query: &x {identity: 2}, key: *x, value: *x")
    text += f"    expect: [{{stage: output, printed: {printed}}}]\n{more}"
    (folder / "cases.yaml").write_text(text, encoding="utf-8")
    path, named = folder / "cases.yaml", ("cases.yaml", "cases", ())
    [case] = load_cached_case_file(path, named, store or Store(folder / "store"), lambda: load_case_file(path, *named))
    return case


def test_numbers_of_a_file_are_expected_to_the_last_bit_or_refused(tmp_path: Path) -> None:
    for numbers in (np.array([[1 / 3, 2e-320], [-np.inf, 4.0]]), np.ones((2, 2))):  # it is read again, though kept
        np.save(tmp_path / "output.npy", numbers)
        [expected] = load_expecting(tmp_path, "{file: output.npy}").expected
        assert (expected.stored, expected.basis) == (True, "printed")
        assert expected.numbers is not None
        np.testing.assert_array_equal(expected.numbers.value, numbers.reshape(1, 1, 2, 2))
        assert not expected.numbers.radius.any()
    dtypes = "    dtypes: [float32, bfloat16]\n    computed_in: "
    assert load_expecting(tmp_path, "{file: output.npy}", f"{dtypes}bfloat16\n").computed_in == "bfloat16"
    np.save(tmp_path / "narrow.npy", np.ones((2, 1)))
    np.save(tmp_path / "many.npy", np.ones((200, 200)))
    for printed, message in TABLES["stored_refused"].items():
        with pytest.raises(CaseError, match=message):
            load_expecting(tmp_path, printed)
    with pytest.raises(CaseError, match="without bfloat16 among `dtypes`"):
        load_expecting(tmp_path, "{file: output.npy}", f"{dtypes}float16\n")


@pytest.fixture
def as_in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read cases as in a checkout, which has no parsed cases of a build."""
    monkeypatch.setattr(case_module, "read_entry", lambda key: None)


@pytest.mark.usefixtures("as_in_a_checkout")
def test_bundled_cases_come_back_as_they_were(tmp_path: Path) -> None:
    store, names = Store(tmp_path), ("documents", "attention", "masks_of_models", "packed", "designs/scores")
    first = select_cases(names, store=store)
    assert store.event_counts.keys() == {"missing", "kept"}
    second = select_cases(names, store=store)
    assert store.event_counts["found"] == store.event_counts["kept"]
    assert list(map(digest_of, second.cases)) == list(map(digest_of, first.cases))
    assert second.tags == first.tags


@pytest.mark.usefixtures("as_in_a_checkout")
def test_a_file_that_was_changed_is_read_again_and_what_is_wrong_is_said_every_time(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "store"), tmp_path / "file.yaml"
    select(tmp_path, "{values: [[0, 1]]}", store)
    before = path.stat()
    path.write_text(path.read_text().replace("at hand", "to hand"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert select_cases([path.name], base=tmp_path, store=store).cases[0].name == "The case to hand"
    assert store.event_counts["found"] == 1, "the bundled tags"
    tagged = "{values: [[0, 1]]}}\n    tags: [mine]\n    options: {"
    (tmp_path / "tags.yaml").write_text("tags: {mine: {probes: Something., defect: None yet.}}\n")
    assert select(tmp_path, tagged, store).cases[0].tags == ("mine",)
    (tmp_path / "tags.yaml").unlink()  # a tag that is defined no more
    for _ in range(2):
        [wrong] = select(tmp_path, tagged, store).faults
        assert "undefined tag 'mine'" in wrong.message


class _Foreign:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


def test_what_is_no_list_of_cases_is_no_entry() -> None:
    pickled = [pickle.dumps(content) for content in ([_Foreign()], [eval], [1], None)]
    for content in (*pickled, serialize_cases([])[:5], b""):
        for data in (content, zlib.compress(content)):
            with pytest.raises(UnreadableEntry):
                deserialize_cases(data)
