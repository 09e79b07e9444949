"""The bundled corpus: it loads and is complete, its schemas are those of the code, and every two options meet in it.

``published/`` holds what the transcribed documents print, copied from them character by character: a line with what was
printed, then the numbers. Every printed number is as in the source, and every step is covered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from bundled import bundled

from attncheck.backends import ALL_ENTRIES
from attncheck.backends.contract import CODE_FORMATS
from attncheck.planning.plan import EMPTY_ROWS, Level, levels_in_case, option_levels
from attncheck.reading import array_kinds
from attncheck.reading.case import Case, ExpectedStage
from attncheck.reading.case_maker import SCORE_KINDS_OF_OPTION
from attncheck.reading.expected_failures import load_bundled_expected_failures
from attncheck.reading.inputs import make_exact_inputs
from attncheck.reading.schema import tag_file_schema
from attncheck.reading.selection import TILE_TEMPLATE, make_for_each_row_of_tile, select_cases
from attncheck.reading.shapes import axis_lengths
from attncheck.spec import (
    DEFAULT_FORMAT,
    OPERATIONS,
    OPERATIONS_BY_SCORE,
    REPLACES,
    SCORE_INPUTS,
    STAGE_SPECS,
    Operation,
)

ROOT = Path(str(files("attncheck.cases")))
CORPUS = bundled()
YAML_FILES = sorted(path for path in ROOT.rglob("*.yaml"))
CASE_FILES = [path for path in YAML_FILES if path.name != "tags.yaml"]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def cases_of(operation: str) -> list[Case]:
    return [case for case in CORPUS.cases if case.operation == operation]


def test_every_case_runs_in_float32_and_in_float64_unless_it_is_about_sizes_or_narrow_formats() -> None:
    in_designs = [case for case in CORPUS.cases if case.id.startswith("designs/")]
    assert [case.id for case in CORPUS.cases if "float32" not in case.dtypes and case not in in_designs] == []
    narrow = [case for case in CORPUS.cases if "float64" not in case.dtypes]
    # What shows at a size is the path that a kernel takes there, and few have fast ones in float64.
    about = ("kernel_shapes/", "precision/", "designs/", "offsets/")
    assert [case.id for case in narrow if "half-precision" not in case.tags and not case.id.startswith(about)] == []


def test_known_numbers_say_where_they_come_from_and_only_documents_print_numbers_or_leave_them_out() -> None:
    known = [(case.id, own) for case in CORPUS.cases for own in case.expected if own.basis == "known"]
    assert len(known) >= 20
    assert [case_id for case_id, own in known if not own.because or len(own.because.split()) < 3] == []
    bases = {(case.is_document, own.basis) for case in CORPUS.cases for own in case.expected if own.basis != "known"}
    assert bases == {(True, "printed"), (True, "unprinted")}


def test_every_expected_failure_names_cases_that_there_are() -> None:
    with_properties = select_cases(["properties"], properties=True).cases
    for expected in load_bundled_expected_failures(list(ALL_ENTRIES)):
        cases = with_properties if expected.entry.property else CORPUS.cases
        for glob in expected.entry.cases:
            if glob.startswith("search/"):  # problems that a search draws: attncheck.searching.concrete
                continue
            dtypes = {dtype for case in cases if fnmatchcase(case.id, glob) for dtype in case.dtypes}
            assert dtypes & set(expected.entry.dtypes or dtypes), f"{expected.location}: {glob}"


def test_the_schema_of_tags_is_that_of_the_code_every_file_names_its_own_and_every_named_array_is_used() -> None:
    assert (ROOT / "tags.schema.json").read_text(encoding="utf-8") == tag_file_schema()
    for path in YAML_FILES:
        text = path.read_text(encoding="utf-8")
        first = text.splitlines()[0]
        wanted = ROOT / ("tags.schema.json" if path.name == "tags.yaml" else "schema.json")
        assert first.startswith("# yaml-language-server: $schema="), path
        assert (path.parent / first.partition("=")[2]).resolve() == wanted.resolve(), path
        if path.parent.name != "documents":
            content = yaml.load(text, yaml.CSafeLoader)
            assert set(content.get("arrays", {})) <= set(_words(content)), path


def _words(node: Any) -> Iterator[str]:
    """Yield every string of a document that is a value, at any depth."""
    if isinstance(node, str):
        yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _words(each)


def test_every_bundled_file_loads_without_fault_and_warning_and_every_name_is_a_sentence() -> None:
    assert CORPUS.faults == ()
    of_properties = {"cases/properties.yaml"}  # what holds between two calls is asked by itself
    assert {case.file for case in CORPUS.cases} | of_properties == {f"cases/{shown(path)}" for path in CASE_FILES}
    assert len({case.id for case in CORPUS.cases}) == len(CORPUS.cases)
    assert [warning for case in CORPUS.cases for warning in case.warnings] == []
    names = [case.name for case in CORPUS.cases]
    assert [name for name in names if not name[0].isupper() or len(name.split()) < 3 or name.endswith(".")] == []
    assert {tag for case in CORPUS.cases for tag in case.tags} == set(CORPUS.tags)
    short = [name for name, tag in CORPUS.tags.items() if min(len(tag.probes.split()), len(tag.defect.split())) < 3]
    assert short == []


def test_every_option_and_input_of_every_operation_and_score_is_asked_for_and_left_out() -> None:
    missing = []
    for operation, own in OPERATIONS.items():
        cases = cases_of(operation)
        given = [{*case.options, *case.inputs} for case in cases]
        optional = {name for name, spec in own.inputs.items() if not spec.required} | ({"scale"} & own.options)
        lowered = OPERATIONS.get(own.lowers_to or "")
        is_more = lowered is not None and lowered.inputs.keys() <= own.inputs.keys()  # what both take is held there
        handed_on = {*lowered.inputs, *lowered.options} if lowered is not None and is_more else set()
        missing += [(operation, name) for name in {*own.options, *own.inputs} - set().union(*given, handed_on)]
        missing += [(operation, "without", name) for name in optional & set.intersection(*given)]
        missing += [(operation, "five cases")] * (len(cases) < 5)
        narrow = (sum(dtype in case.dtypes for case in cases) for dtype in ("bfloat16", "float16"))
        missing += [(operation, "sixteen bits")] * (min(narrow) < 2)
    assert missing == []
    asked = {score: set[str]() for score in SCORE_INPUTS}
    for case in cases_of("scoring"):
        asked[case.options.get("score", "scaled_dot")] |= case.inputs.keys()
    assert asked == {score: set(inputs) for score, inputs in SCORE_INPUTS.items()}


# Every two and three options meet.

NEVER_TOGETHER = ({"mask_fill", EMPTY_ROWS},)
"""Options that say something else of the same rows: a row that is filled is not empty."""
HANDED_ON = frozenset({"head_scale"})
"""Options that operations which become attention hand on to it as they are, so that they meet the others there."""
STORED = {name for name in OPERATIONS["quantized_attention"].inputs if name.endswith(("_scale", "_zero"))} - {
    "head_scale"
}
STORED |= {"stored_as", "packing", "swizzle"}
"""How codes are stored, which is undone before anything is computed: cases/block_formats.yaml has its own design."""
OF_PAIRS = frozenset({"masking", "packed_attention_gradients", *OPERATIONS_BY_SCORE})
"""Operations of which every two options meet: what comes after the scores is that of attention by a dot product."""

Levels = tuple[Level, ...]


def together(operation: Operation, strength: int) -> Iterator[Levels]:
    """Yield levels of so many options that can meet."""
    aside = (HANDED_ON if operation.is_lowered else frozenset()) | STORED
    asked = [own for name, own in option_levels(operation).items() if name not in aside]
    for options in combinations(asked, strength):
        yield from (levels for levels in product(*options) if not why_never(levels))


def why_never(levels: Levels) -> str:
    """Say why levels cannot meet; empty where they can."""
    texts, options = {level.description for level in levels}, {level.option for level in levels}
    for option, scores in SCORE_KINDS_OF_OPTION.items():
        if option in options and "score" in options and not texts & {f"score {score}" for score in scores}:
            return f"only {', '.join(scores)} have a {option}"
    for option, inputs in REPLACES.items():
        if option in options and not inputs.isdisjoint(options):
            return f"{' and '.join(inputs)} say what {option} would"
    if "score_bias" in options:
        if "score" in options and not texts & {"score additive", "score general"}:
            return "score_bias is an input of the additive and the bilinear score alone"
        if options & SCORE_KINDS_OF_OPTION.keys():
            return "the additive and the bilinear score have neither a scale nor a softcap"
    return next((f"{' and '.join(sorted(pair))} do not meet" for pair in NEVER_TOGETHER if pair <= options), "")


def hands_on(operation: Operation) -> bool:
    """Whether an operation hands all that another one takes on to that, where they meet."""
    lowered = OPERATIONS.get(operation.lowers_to or "")
    return lowered is not None and lowered.inputs.keys() <= operation.inputs.keys()


@cache
def levels_in(case_id: str) -> frozenset[Level]:
    """Return the levels that a case gives, of which those of empty rows need its inputs."""
    return levels_in_case(next(case for case in CORPUS.cases if case.id == case_id))


@cache
def met(operation: str, strength: int) -> frozenset[frozenset[Level]]:
    """Return the levels that meet in any case of an operation."""
    return frozenset(
        frozenset(levels) for case in cases_of(operation) for levels in combinations(levels_in(case.id), strength)
    )


def missing(operation: Operation, strength: int) -> list[str]:
    """Say which levels stand together in no case, each in a line."""
    found = met(operation.name, strength)
    return [
        f"{operation.name}: no case has {' and '.join(level.description for level in levels)}"
        for levels in together(operation, strength)
        if frozenset(levels) not in found
    ]


def test_every_format_of_codes_meets_every_option() -> None:
    asked = {*OPERATIONS["quantized_attention"].options, "mask", "key_lengths", "sinks", "query_scale"}
    asked -= {"stored_as", "packing", "swizzle"}
    pairs = {
        (case.options.get("stored_as"), name)
        for case in cases_of("quantized_attention")
        for name in ({*case.inputs, *case.options} & asked)
    }
    formats = CODE_FORMATS.keys() - {DEFAULT_FORMAT}
    wanted = {
        (stored, name) for stored in formats for name in asked if (stored, name) != ("float8_e5m2", "query_scale")
    }
    assert sorted(wanted - pairs) == []


@pytest.mark.parametrize("strength", [2, 3])
def test_every_two_and_three_options_that_can_meet_do(strength: int) -> None:
    asked = [own for own in OPERATIONS.values() if not hands_on(own) and (strength == 2 or own.name not in OF_PAIRS)]
    lines = [line for own in asked for line in missing(own, strength)]
    assert not lines, "\n".join([*lines, "give the operation's design in cases/designs a factor or a level for it"])


# Every option meets every class of lengths.

TILE, LONG = 16, 300
"""Tiles of other sizes are multiples of the smallest that kernels have; 300 keys are more than any tile has."""
SUM_OVER_KEYS = {"softmax", "means", "gradients"}
"""Parts of the computation in which a kernel goes over the keys tile by tile, and merges."""
PHASES, LENGTHS = ("decode", "prefill"), ("single", "aligned", "one over", "one under", "long")


def goes_over_keys(operation: Operation) -> bool:
    """Whether an operation has queries and keys, and a stage that is summed over the keys."""
    axes = {axis for spec in operation.inputs.values() for axis in spec.axes}
    return (
        {"Lq"} <= axes
        and bool(axes & {"Lk", "T", "W"})
        and any(STAGE_SPECS[stage].computation_part in SUM_OVER_KEYS for stage in operation.stages)
    )


def options_at_lengths(operation: Operation) -> set[str]:
    """Return the options that meet every class of lengths in cases of an operation; "" stands for the operation.

    Masks and scores come before the sum over keys, gradients of a lowered operation are made of its forward pass and of
    the gradients of attention, attention by another score is attention after the score, and a softmax by itself is a
    step of attention, where its options meet them.
    """
    if (
        not goes_over_keys(operation)
        or operation.fixed_score
        or (operation.is_lowered and operation.computes_gradients)
    ):
        return set()
    aside = STORED | (HANDED_ON if operation.is_lowered else set())
    return {"", *(option_levels(operation).keys() - aside if operation.name != "softmax" else ())}


def lengths_of(case: Case) -> list[tuple[int, int]]:
    """Return the numbers of queries and keys that attend to each other, of every sequence or batch entry."""
    lengths = axis_lengths(case.operation, case.options, case.input_shapes)
    if not {"cu_seqlens_k", "block_table"} & case.inputs.keys():
        return [(lengths["Lq"], lengths["T"] if "T" in lengths else lengths["Lk"])]
    exact = {
        name: made.array.astype(int)
        for name, made in make_exact_inputs(case).items()
        if case.input_specs[name].is_count
    }
    if "cu_seqlens_q" not in exact:
        return [(lengths["Lq"], int(keys)) for keys in exact["key_lengths"]]
    queries = np.diff(exact["cu_seqlens_q"])
    keys = np.diff(exact["cu_seqlens_k"]) if "cu_seqlens_k" in exact else exact["key_lengths"]
    return [*zip(queries.tolist(), np.minimum(keys, exact.get("key_lengths", keys)).tolist(), strict=True)]


def classes_of(queries: int, keys: int) -> Iterator[tuple[str, str]]:
    """Yield the phase and the classes of lengths: of a single query the keys count, of several both."""
    if queries and keys:
        phase, both = ("decode", [keys]) if queries == 1 else ("prefill", [queries, keys])
        holds = (
            keys == 1,
            all(length % TILE == 0 for length in both),
            any(length > 1 and length % TILE == 1 for length in both),
            any(length % TILE == TILE - 1 for length in both),
            keys >= LONG,
        )
        yield from ((phase, name) for name, is_so in zip(LENGTHS, holds, strict=True) if is_so)


def has_a_class(operation: Operation, option: str, phase: str, length: str) -> bool:
    """Whether an option can be given at a class of lengths.

    A past and a key of its own are two keys. Causality that begins at the first key leaves a single query one key,
    however many there are.
    """
    spec = operation.inputs.get(option)
    if option == "is_causal" and phase == "decode":
        return "alignment" in operation.options or "query_offsets" in operation.inputs
    return not (length == "single" and spec is not None and "P" in spec.axes)


def test_every_option_meets_keys_of_every_class_of_lengths_with_one_query_and_with_several() -> None:
    holes = []
    for operation in OPERATIONS.values():
        wanted = options_at_lengths(operation)
        found = {
            (option, phase, length)
            for case in (cases_of(operation.name) if wanted else ())
            for queries, keys in set(lengths_of(case))
            for phase, length in classes_of(queries, keys)
            for option in {"", *(level.option for level in levels_in(case.id))}
        }
        holes += [
            f"{operation.name}{option and ' with '}{option}: no case is {phase}, {length}"
            for option, phase, length in product(sorted(wanted), PHASES, LENGTHS)
            if has_a_class(operation, option, phase, length) and (option, phase, length) not in found
        ]
    assert not holes, "\n".join([*holes, "give the operation's cases in cases/designs a row of such lengths"])


FEW = 2
"""Options that a kernel of few options has, beside heads that share keys and values of another width."""


def test_kernels_of_few_options_meet_whole_tiles_the_key_behind_them_and_long_keys() -> None:
    counted = option_levels(OPERATIONS["attention"]).keys() - {"shared heads", "width of values"}
    holes = []
    for operation in OPERATIONS.values():
        simple = [
            case
            for case in (cases_of(operation.name) if options_at_lengths(operation) else ())
            if len({level.option for level in levels_in(case.id)} & counted) <= FEW
        ]
        found = {each for case in simple for lengths in set(lengths_of(case)) for each in classes_of(*lengths)}
        wanted = product(PHASES, ("aligned", "one over", "long")) if options_at_lengths(operation) else ()
        holes += [f"{operation.name}: {phase}, {length}" for phase, length in wanted if (phase, length) not in found]
    assert not holes, "\n".join([*holes, "give the operation's cases in cases/designs a row that is named alone"])


# Sizes with paths of their own.


def test_the_file_has_the_rows_that_are_made_for_its_tiles() -> None:
    """Else a case of that name would be one thing in the corpus and another with ``--tile``."""
    made = {case.id: case for case in select_cases(["kernel_shapes/lengths"], tiles=[128]).cases}
    sized = {case.id: case for case in select_cases(["kernel_shapes"]).cases}
    own = {name: case for name, case in sized.items() if "-tile-128" in name and "-tile-1280" not in name}
    assert own.keys() == {identity for identity in made if identity.startswith(f"{TILE_TEMPLATE}/")}
    for field in ("name", "inputs", "input_shapes", "options", "dtypes", "tags", "judged_stages", "random", "line"):
        assert [name for name, case in own.items() if getattr(case, field) != getattr(made[name], field)] == [], field
    assert make_for_each_row_of_tile(128)["whole"] == 128


PUBLISHED = Path(__file__).with_name("published")
CASES = {case.id.removeprefix("documents/"): case for case in select_cases(["documents"]).cases}
TRANSCRIBED: dict[str, Any] = yaml.load((PUBLISHED / "transcribed.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
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


def texts(expected: ExpectedStage) -> list[str]:
    """The numbers of an expectation as they stand in the file, in the order of the document."""
    assert expected.numbers is not None
    numbers = (
        expected.numbers.rearrange(lambda array: array.swapaxes(-1, -2)) if expected.transpose else expected.numbers
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
