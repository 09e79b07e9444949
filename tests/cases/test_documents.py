"""The transcribed documents: every printed number as in the source, every step covered, and all of them hold.

``published/`` holds what the documents print, copied from them character by character: a line with what was printed,
then the numbers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from attncheck.reading import array_kinds
from attncheck.reading.case import Expected
from attncheck.reading.selection import select_cases

PUBLISHED = Path(__file__).with_name("published")
CASES = {case.id.removeprefix("documents/"): case for case in select_cases(["documents"]).cases}
TRANSCRIBED: dict[str, Any] = yaml.safe_load((PUBLISHED / "transcribed.yaml").read_text(encoding="utf-8"))
NUMBER = re.compile(r"-?inf|(?<![A-Za-z])-?\d+\.?\d*(?:e[+-]?\d+)?")

VIGNETTE = "base_r_vignette/four-words-attend-to-each-other"
NOTEBOOK_UNMASKED = "masked_self_attention_notebook/the-call-as-the-notebook-writes-it-with-mask-none"


def published(document: str) -> list[tuple[str, list[str]]]:
    """What a document prints, in its order: the name under which it does, and the numbers as texts."""
    blocks = (PUBLISHED / f"{document}.txt").read_text(encoding="utf-8").strip().split("\n\n")
    return [_block(block.splitlines()) for block in blocks]


def _block(lines: list[str]) -> tuple[str, list[str]]:
    if lines[0].startswith("print("):  # R, which labels columns and rows: "#> [,1]" and "#> [1,] 6 4 10 5"
        rows = [line.removeprefix("#> ").partition("] ")[2] for line in lines[2:]]
        return lines[0].removeprefix("print(").removesuffix(")"), " ".join(rows).split()
    if len(lines) == 1:  # a literal: annotation = [3,12,45] #e.g. Encoder hidden state
        name, _, literal = lines[0].partition(" = ")
        return name, NUMBER.findall(literal.partition("#")[0])
    return lines[0], NUMBER.findall(" ".join(lines[1:]))


def texts(expected: Expected) -> list[str]:
    """The numbers of an expectation as they stand in the file, in the order of the document."""
    assert expected.numbers is not None
    numbers = (
        expected.numbers.laid_out(lambda array: array.swapaxes(-1, -2)) if expected.transpose else expected.numbers
    )
    return [str(text) for text in numbers.text.ravel()]


def printed_by(case_id: str, called: str) -> list[str]:
    (found,) = [own for own in CASES[case_id].expected if own.called == called and own.basis == "printed"]
    return texts(found)


def test_every_printed_number_and_input_is_transcribed_digit_by_digit() -> None:
    for document, place, name, case_id, called, count in TRANSCRIBED["printed"]:
        source_name, source = published(document)[place]
        assert (source_name, len(source)) == (name, count)
        assert printed_by(case_id, called) == source, (document, place)
    for document, case_id, name, place, count in TRANSCRIBED["inputs"]:
        source_name, source = published(document)[place]
        array = CASES[case_id].arrays[name]
        assert isinstance(array, array_kinds.PrintedInput)
        assert (source_name, len(source)) == (name, count)
        assert NUMBER.findall(str(array.printed)) == source, (document, place)
    for document, place, case_id, name in TRANSCRIBED["literals"]:
        source_name, source = published(document)[place]
        array = CASES[case_id].arrays[name]
        assert isinstance(array, array_kinds.Values)
        assert source_name == name
        # The post transposes what it writes, so that as written its rows are the file's.
        assert np.array(array.values, dtype=np.float64).ravel().tolist() == [float(text) for text in source]
    # The notebook's first mask is the transcribed one before zeros became minus infinity.
    first, second = (published("masked_self_attention_notebook")[place] for place in (5, 6))
    assert first[0] == second[0] == "mask"
    assert [{"1.": "0.", "0.": "-inf"}[text] for text in first[1]] == second[1]
    assert "0.8429010" in printed_by(VIGNETTE, "weights")  # zeros that R prints at the end are kept


def test_no_block_that_a_document_prints_is_left_out_and_none_is_called_printed_that_is_not() -> None:
    covered = {(document, place) for name in ("printed", "literals") for document, place, *_ in TRANSCRIBED[name]}
    covered |= {(document, place) for document, _, _, place, _ in TRANSCRIBED["inputs"]}
    covered |= {("masked_self_attention_notebook", 5)}  # the mask before it became one of minus infinity
    files = sorted(PUBLISHED.glob("*.txt"))
    assert covered == {(path.stem, place) for path in files for place in range(len(published(path.stem)))}
    assert {(case_id, called) for *_, case_id, called, _ in TRANSCRIBED["printed"]} == {
        (name, own.called) for name, case in CASES.items() for own in case.expected if own.basis == "printed"
    }


def test_every_step_that_a_document_computes_is_covered_under_its_own_name() -> None:
    assert all(case.is_document for case in CASES.values())
    called = {name: list(dict.fromkeys(own.called for own in case.expected)) for name, case in CASES.items()}
    assert called == TRANSCRIBED["steps"]
    assert [name for name, case in CASES.items() if any(own.erratum for own in case.expected)] == [NOTEBOOK_UNMASKED]
