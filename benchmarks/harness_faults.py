"""Power of the tests: faults put into the harness itself, one at a time, and whether its tests catch them.

    python benchmarks/harness_faults.py                  every fault, against the tests of this tree
    python benchmarks/harness_faults.py tier_ store_     the faults whose names begin so
    python benchmarks/harness_faults.py --tree HEAD~20   the same faults in an earlier tree, against its own tests
    python benchmarks/harness_faults.py --check          whether every old text is there exactly once; runs nothing

Each row of the table below replaces one text of one file in a copy of the tree. The tests named there run first, and
where all of them pass, the rest of their folders. A test that fails counts where it passes without the fault. The exit
code is 1 where a fault is caught by none. It takes minutes to an hour, and is no part of the tests.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::\S.*?)?)(?: - .*)?$", re.MULTILINE)
_MIRRORED = ("backends", "cases", "reports")


@dataclass(frozen=True)
class Fault:
    """One replaced text: what it breaks, and the tests that ought to notice, files or folders below ``tests``."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


def _fault(name: str, file: str, old: str, new: str, breaks: str, tests: str) -> Fault:
    return Fault(name, file, old, new, breaks, tuple(tests.split()))


_DOUBLE_WORDS = (
    (
        "double_sum_half",
        "SUM_ERROR, PRODUCT_ERROR, QUOTIENT_ERROR, ROOT_ERROR = 3 * U2,",
        "SUM_ERROR, PRODUCT_ERROR, QUOTIENT_ERROR, ROOT_ERROR = 1.5 * U2,",
        "half the error of a sum",
    ),
    ("double_product_half", "3 * U2, 7 * U2,", "3 * U2, 3.5 * U2,", "half the error of a product"),
    ("double_quotient_half", "7 * U2, 16 * U2,", "7 * U2, 8 * U2,", "half the error of a quotient"),
    ("double_root_half", "16 * U2, 4 * U2", "16 * U2, 2 * U2", "half the error of a square root"),
    ("double_exp_half", "EXP_ERROR = 4 * U2", "EXP_ERROR = 2 * U2", "half the error of an exponential"),
    (
        "double_polynomial_half",
        "POLYNOMIAL_ERROR = 2.0**-102",
        "POLYNOMIAL_ERROR = 2.0**-103",
        "half the error of e^x - 1 near 0",
    ),
    ("double_log_half", "LOG_ERROR = 2.0**-101", "LOG_ERROR = 2.0**-103", "a quarter of the error of a logarithm"),
    (
        "double_one_sum_half",
        "ONE_SUM_ERROR = 2 * U2",
        "ONE_SUM_ERROR = 1 * U2",
        "half the error of a sum with one number",
    ),
    (
        "double_product_term",
        "size * y_radius + x_radius * (others + y_radius) + PROD",
        "size * y_radius + x_radius * others + PROD",
        "no product of the radii",
    ),
    (
        "double_product_operand",
        "size * y_radius + x_radius * (others + y_radius) + PROD",
        "x_radius * (others + y_radius) + PROD",
        "the radius of one factor moves nothing",
    ),
    (
        "double_quotient_operand",
        "(x_radius + quotient * y_radius)",
        "(x_radius)",
        "the radius of the divisor moves nothing",
    ),
    (
        "double_exp_operand",
        "moved = x_radius * (1 + 2.0**-20) if x_radius.max(initial=0) < 2.0**-20 else np.expm1(x_radius)",
        "moved = x_radius",
        "an exponential moves as its argument does",
    ),
    (
        "double_log_operand",
        "LOG_ERROR + x_radius / np.where(least > 0, least, 0.0)",
        "LOG_ERROR + x_radius / x",
        "the radius of a logarithm's operand is not taken from it",
    ),
    (
        "double_tanh_operand",
        "error + np.expm1(x_radius)",
        "error + 0 * np.expm1(x_radius)",
        "the radius of a tangent's operand moves nothing",
    ),
    ("double_sums_levels", "levels * (levels + 3) * U2 * size", "U2 * size", "one rounding for a whole row"),
    (
        "double_sums_operand",
        "self.radius.sum(axis=-1, keepdims=True) + levels",
        "levels",
        "radii of a row are not added up",
    ),
    (
        "double_matrix_cut",
        "radius = radius + cut * some",
        "pass",
        "what slices leave, and products of them that are left out, are not bounded",
    ),
    ("double_matrix_slice_fewer", "MAX_SLICES = 8\n", "MAX_SLICES = 5\n", "fewer slices than a number may need"),
    (
        "double_matrix_keeps_fewer",
        "cut = 4 * 2.0 ** (-bits * most)",
        "cut = 4 * 2.0 ** (-bits * (most + 1))",
        "more is left out than said",
    ),
    (
        "double_matrix_bits",
        "math.floor((53 - math.log2(2.6 * inner)) / 2)",
        "26",
        "slices so wide that their sums round",
    ),
    (
        "double_matrix_plain",
        "plain = max(math.ceil((needed - PLAIN_BITS) / bits), 1)",
        "plain = 1",
        "sums of slices are added up in float64 from the second on",
    ),
    (
        "double_matrix_operand",
        "left_radius @ (right + right_radius)",
        "left_radius @ right",
        "no product of the radii of matrices",
    ),
    (
        "double_matrix_operand2",
        "+ left @ right_radius if",
        "if",
        "the radius of the right matrix moves nothing",
    ),
    (
        "double_product_underflow",
        "_UNDERFLOW_LOSS * ((size + x_radius",
        "0 * ((size + x_radius",
        "nothing is lost to underflow in products",
    ),
    (
        "double_matrix_underflow",
        "moved + _UNDERFLOW_LOSS * (some",
        "moved + 0 * (some",
        "nothing is lost to underflow in products of matrices",
    ),
    (
        "double_reduction",
        "rest, third = _two_sum(rest, -steps * parts[2])",
        "third = 0 * rest",
        "the third part of log 2 is left out",
    ),
    ("double_nodes", "0.5 * error + t * low", "0.5 * error", "the low word of an exponent is not multiplied"),
    ("double_series", "tail = s[0] * (1 / 120", "tail = s[0] * (1 / 121", "a wrong coefficient"),
    (
        "double_exp_tiny",
        "(radius + _LEAST_SUBNORMAL * (size < _NEAR_UNDERFLOW))",
        "(radius)",
        "nothing is lost to underflow in exponentials",
    ),
)
"""Faults in the bounds of double words: the name, the text, what replaces it, and what that breaks."""
_TESTS_OF_DOUBLE_WORDS = "harness/attention/test_double_words.py"

FAULTS: tuple[Fault, ...] = (
    # Judging
    _fault(
        "tier_statistical_passes",
        "harness/judging/compare.py",
        "return self in (ErrorTier.STATISTICAL, ErrorTier.PROVEN)",
        "return self is ErrorTier.PROVEN",
        "the statistical tier fails nothing",
        "harness/judging/test_comparisons.py harness/judging/test_judge.py",
    ),
    _fault(
        "tier_bound_doubled",
        "harness/judging/compare.py",
        "and bool((least > max_error).any()):",
        "and bool((least > 2 * max_error).any()):",
        "an error has to be twice its bound",
        "harness/judging/test_comparisons.py harness/judging/test_judge.py",
    ),
    _fault(
        "tier_radius_ignored",
        "harness/judging/compare.py",
        "np.maximum(error - radius, 0.0)",
        "np.maximum(error, 0.0)",
        "the enclosure of the exact value is taken for exact",
        "harness/judging/test_comparisons.py",
    ),
    _fault(
        "stage_dtype_ignored",
        "harness/judging/judge_stages.py",
        "if wanted is not None and str(array.dtype) != expected_dtype:",
        "if wanted is not None and array.dtype.kind not in 'fV':",
        "a stage of another dtype is judged by its numbers",
        "harness/judging/test_judge.py",
    ),
    _fault(
        "stage_begins_at_the_first_failing",
        "harness/judging/judge_stages.py",
        'return next(iter(at_fault), failing[0].stage if failing else "")',
        'return failing[0].stage if failing else ""',
        "a stage that inherits its error is blamed",
        "harness/judging/test_judge.py harness/judging/test_diagnosis.py",
    ),
    _fault(
        "stage_order_of_norms",
        "harness/judging/judge_stages.py",
        'if not (options or {}).get("norm_after_rotation"):',
        'if not (options or {}).get("norm_before_rotation_"):',
        "norms are judged before rotations that come first",
        "harness/judging/test_judge.py harness/judging/test_case_diagnosis.py",
    ),
    _fault(
        "stage_nan_swallowed",
        "harness/judging/stage_bounds.py",
        "            odd |= self.nonfinite_exact_elements & ~(",
        "            odd |= False & ~(",
        "a finite number passes where NaN is the exact answer",
        "harness/judging/test_undefined.py harness/judging/test_judge.py",
    ),
    _fault(
        "compare_dtype_by_size",
        "harness/judging/compare.py",
        "if first.dtype != second.dtype:",
        "if first.dtype.itemsize != second.dtype.itemsize:",
        "float16 and bfloat16 compare as one dtype",
        "harness/judging/test_comparisons.py",
    ),
    _fault(
        "compare_at_the_bound",
        "harness/judging/compare.py",
        "Verdict.NUMERIC if bool((difference > allowed).any()) else Verdict.AGREE,",
        "Verdict.NUMERIC if bool((difference >= allowed).any()) else Verdict.AGREE,",
        "a difference as large as is allowed is wrong",
        "harness/judging/test_comparisons.py",
    ),
    _fault(
        "xfail_of_the_same_stage",
        "harness/judging/xfail.py",
        "if stage_position(expected.stage) <= stage_position(row.stage):",
        "if stage_position(expected.stage) < stage_position(row.stage):",
        "a pair fails at the stage at which its member is expected to",
        "harness/judging/test_xfail.py",
    ),
    _fault(
        "xfail_size_not_said",
        "harness/judging/xfail.py",
        "    if not concerning or any(entry.excuses_error(stage, verdict, ratio) for entry in concerning):",
        "    if concerning or not concerning:",
        "a failure beyond the recorded size does not say so",
        "harness/judging/test_xfail.py",
    ),
    _fault(
        "xpass_of_what_need_not_happen",
        "harness/judging/xfail.py",
        "if number not in self.confirmed_entries and self.expected_failures[number].must_still_happen",
        "if number not in self.confirmed_entries",
        "an entry that may happen fails a run in which it does not",
        "harness/judging/test_xfail.py",
    ),
    _fault(
        "special_open_log_sum_exp",
        "harness/judging/undefined.py",
        "return nan_rows, empty & (nan_rows | (self.empty_rows_convention != DEFAULT_EMPTY_ROWS))",
        "return nan_rows, empty & nan_rows",
        "log_sum_exp of a row without a key is judged under every convention",
        "harness/judging/test_undefined.py",
    ),
    _fault(
        "verdict_untried_disagrees",
        "harness/spec/verdicts.py",
        "dict.fromkeys((Verdict.UNTRIED, Verdict.ERROR,",
        "dict.fromkeys((Verdict.ERROR,",
        "what was not tried counts as wrong",
        "harness/test_words.py harness/test_run.py harness/test_cli.py",
    ),
    # Bounds and exact answers
    _fault(
        "bound_of_weights_halved",
        "harness/attention/softmax.py",
        "max_error = (moved * (1 + relative) + p * relative) * (1 + 2 * relative) + floor",
        "max_error = (moved * (1 + relative) + p * relative) * (1 + 2 * relative) / 2 + floor",
        "the bound of the weights is half",
        "harness/attention/test_bounds.py harness/judging/test_golden.py",
    ),
    _fault(
        "bound_of_a_step_halved",
        "harness/attention/weighted_mean.py",
        "    max_error = relative * (w @ size)\n",
        "    max_error = relative * (w @ size) / 2\n",
        "the output's bound from given weights is half",
        "harness/attention/test_bounds.py harness/judging/test_golden.py",
    ),
    _fault(
        "bound_of_log_sum_exp_without_its_sum",
        "harness/attention/softmax.py",
        "        moved\n        + summed\n        + (rounding.log_error + unit)",
        "        moved\n        + (rounding.log_error + unit)",
        "the rounding of the sum is left out of the bound of log_sum_exp",
        "harness/attention/test_bounds.py harness/judging/test_golden.py",
    ),
    _fault(
        "uniform_rows_over_added_keys",
        "harness/attention/softmax.py",
        "return shape[-1] - problem.added_keys",
        "return shape[-1]",
        "a sink counts as a key of a uniform row",
        "harness/judging/test_undefined.py harness/judging/test_golden.py",
    ),
    _fault(
        "fill_not_folded",
        "harness/attention/logits.py",
        "    filled = before.select_where(kept, problem.magnitude_if_absolute(problem.mask_fill))\n",
        "    filled = before.select_where(kept, problem.magnitude_if_absolute(2 * problem.mask_fill))\n",
        "a mask's fill is another number in the exact scores",
        "harness/attention/test_bounds.py",
    ),
    _fault(
        "packed_positions_ignored",
        "harness/reading/lowering.py",
        "    allowed &= pop_position_mask(options, sequences.query_position[:, np.newaxis], sequences.key_position)\n",
        "",
        "causality and windows of packed sequences are not folded into the mask",
        "harness/reading/test_lowering.py",
    ),
    _fault(
        "packed_lengths_ignored",
        "harness/reading/lowering.py",
        'used = np.asarray(inputs.get("key_lengths", lengths[1]), np.int64)',
        "used = np.asarray(lengths[1], np.int64)",
        "keys beyond a packed sequence's length are attended to",
        "harness/reading/test_lowering.py",
    ),
    *(
        _fault(name, "harness/attention/double_words.py", old, new, breaks, _TESTS_OF_DOUBLE_WORDS)
        for name, old, new, breaks in _DOUBLE_WORDS
    ),
    # Reading
    _fault(
        "mask_chunk_without_padding",
        "harness/reading/generated_arrays.py",
        "((query - begin) // source.chunked == (key - begin) // source.chunked)",
        "(query // source.chunked == key // source.chunked)",
        "chunks begin at 0 whatever the padding",
        "harness/reading/test_masks.py",
    ),
    _fault(
        "pages_one_too_many",
        "harness/reading/lowering.py",
        "if not 0 <= number < pages]:",
        "if not 0 <= number <= pages]:",
        "a page that is just not there is accepted",
        "harness/reading/test_messages.py harness/reading/test_lowering.py",
    ),
    _fault(
        "rounded_twice_to_bfloat16",
        "harness/spec/dtypes.py",
        "if name in _EXTENSION_DTYPES and array.dtype != np.float32:",
        "if name == 'none' and array.dtype != np.float32:",
        "bfloat16 is rounded by way of float32",
        "harness/reading/test_masks.py",
    ),
    _fault(
        "printed_digits_ignored",
        "harness/reading/printed.py",
        "        exponent = number.adjusted() - rounding.significant_digits + 1\n",
        "        exponent = int(number.as_tuple().exponent)\n",
        "significant digits that a document states are ignored",
        "harness/reading/test_printed.py",
    ),
    _fault(
        "printed_cut_off_taken_for_rounded",
        "harness/reading/printed.py",
        "return 2 * self.half_unit if self.truncated else self.half_unit",
        "return self.half_unit",
        "numbers that were cut off are held to half a unit",
        "harness/reading/test_printed.py harness/judging/test_judge_numbers.py",
    ),
    _fault(
        "selection_by_all_tags",
        "harness/reading/selection.py",
        "(not tags or bool(set(case.tags) & set(tags)))",
        "(set(tags) <= set(case.tags))",
        "--tag a --tag b selects cases with both",
        "harness/reading/test_selection.py",
    ),
    _fault(
        "selection_same_id_twice",
        "harness/reading/selection.py",
        "        elif first != (path, case.line):",
        "        elif not first:",
        "the same id in two files goes unnoticed",
        "harness/reading/test_selection.py",
    ),
    _fault(
        "yaml_field_given_twice",
        "harness/reading/yaml_reader.py",
        "            if key in mapping:",
        "            if key in mapping and not path:",
        "a field that is given twice in a case takes its last value",
        "harness/reading/test_messages.py",
    ),
    _fault(
        "expression_or_is_and",
        "harness/reading/expressions.py",
        'self._parse_chain("or", self._parse_and, any)',
        'self._parse_chain("or", self._parse_and, all)',
        "`or` selects what both sides do",
        "harness/reading/test_selection.py",
    ),
    # Results
    _fault(
        "narrowed_to_other_dtypes",
        "harness/results/last_failed.py",
        "if unit in units and (not dtypes or unit[1] in dtypes))",
        "if unit in units)",
        "--failed runs dtypes that were not selected",
        "harness/results/test_failed.py",
    ),
    _fault(
        "resume_of_other_cases",
        "harness/results/resume.py",
        "    _require_same_cases(directory, cases)\n",
        "",
        "a run goes on although its cases have changed",
        "harness/test_resume.py",
    ),
    _fault(
        "resume_keeps_what_was_untried",
        "harness/results/resume.py",
        "    if untried:\n",
        "    if untried and not_requested:\n",
        "what was left untried stays so when a run goes on",
        "harness/test_resume.py harness/execution/test_workers.py",
    ),
    _fault(
        "failed_stays_failed",
        "harness/results/last_failed.py",
        "        if self.earlier_failures:\n            for row in rows:\n",
        "        if self.earlier_failures:\n            for row in failed_evaluations(rows) and rows:\n",
        "what agrees now is still listed as failed",
        "harness/results/test_failed.py",
    ),
    _fault(
        "coverage_counts_what_was_not_verified",
        "harness/results/coverage.py",
        "return bool(row.stage) and row.verdict != Verdict.UNVERIFIED",
        "return bool(row.stage)",
        "a case without an exact answer counts as judged",
        "harness/results/test_failed.py",
    ),
    _fault(
        "store_entry_of_another_key",
        "harness/common/store.py",
        'checksum = blake2b(f"{key.kind}/{key.digest}\\n".encode(), digest_size=_CHECKSUM_BYTES)',
        "checksum = blake2b(digest_size=_CHECKSUM_BYTES)",
        "an entry that lies under another key's name is believed",
        "harness/test_store.py",
    ),
    # Running
    _fault(
        "layout_strided_is_contiguous",
        "harness/execution/operations.py",
        "lambda array: _copy_into(_wider_memory(array, 2 * array.shape[-1])[..., ::2], array)",
        "lambda array: _wider_memory(array, 1).size and array.copy()",
        "a strided input is handed over contiguous",
        "harness/execution/test_operations.py",
    ),
    _fault(
        "lacks_not_named",
        "backends/contract.py",
        "        super().__init__(message)\n        self.lacks = lacks",
        "        super().__init__(message)\n        self.lacks = ()",
        "what an implementation lacks is lost",
        "harness/execution/test_operations.py",
    ),
    _fault(
        "padding_faults_lost",
        "harness/execution/padding.py",
        "faults = {stage: fault for stage, (_, fault) in cuts.items() if fault}",
        "faults = {stage: fault for stage, (_, fault) in cuts.items() if not stage and fault}",
        "numbers where zeros belong in what was padded are dropped unseen",
        "harness/execution/test_signatures.py",
    ),
    _fault(
        "worker_result_missing",
        "harness/execution/worker.py",
        "            if refused := _refuse_missing_stages(arrays, expected) or _refuse_too_large(wanted):\n",
        "            if refused := _refuse_too_large(wanted):\n",
        "an implementation that returns nothing passes in silence",
        "harness/execution/test_isolation.py",
    ),
    _fault(
        "merge_pairs_within_a_run",
        "reports/merge.py",
        "        if first.environment == second.environment:\n            continue\n",
        "",
        "pairs of one environment are compared again",
        "harness/test_merge.py",
    ),
    _fault(
        "merge_of_other_inputs",
        "harness/results/records.py",
        "[(array.shape, array.dtype, array.tobytes()) for array in arrays]",
        "[(array.shape, array.dtype) for array in arrays]",
        "runs on other inputs are held against each other",
        "harness/test_merge.py",
    ),
    _fault(
        "property_of_nan_on_one_side",
        "harness/properties/judging.py",
        "(differs & (_is_nan(before.array) != _is_nan(after.array)) & ~spread,",
        "(differs & _is_nan(before.array) & _is_nan(after.array) & ~spread,",
        "NaN of one call and a number of the other is within bounds",
        "harness/properties/test_properties.py",
    ),
    _fault(
        "convention_in_another_unit",
        "harness/asking/conventions.py",
        "if meaning.factor == 1:",
        "if meaning.factor != 0:",
        "a meaning in another unit is judged as if in its own",
        "harness/conventions/test_measure.py",
    ),
    # Reports and the command line
    _fault(
        "junit_error_is_failure",
        "reports/write.py",
        'kind = "error" if verdict.exit_code is ExitCode.NOT_RUN else "failure"',
        'kind = "failure" if verdict.exit_code is ExitCode.NOT_RUN else "failure"',
        "a crash is a failure in JUnit",
        "reports/test_formats.py",
    ),
    _fault(
        "sarif_alert_moves_with_its_case",
        "reports/ci.py",
        '"" if first.dtype else first.case)',
        "first.case)",
        "an alert of a kernel is another one when its simplest case changes",
        "reports/test_formats.py",
    ),
    _fault(
        "annotation_breaks_the_line",
        "reports/ci.py",
        '.replace("\\r", "%0D").replace("\\n", "%0A")',
        '.replace("\\r", "%0D")',
        "a message of two lines ends an annotation",
        "reports/test_formats.py",
    ),
    _fault(
        "diff_worse_is_better",
        "reports/comparison.py",
        "WORSE if after.level > before.level else BETTER",
        "WORSE if after.level >= NO_RESULT > before.level else BETTER",
        "a case that fails now got better",
        "reports/test_diff.py",
    ),
    _fault(
        "answer_not_run_is_agree",
        "reports/summary.py",
        "return ExitCode.NOT_RUN if codes or frames.problems or coverage.shortfall_lines(frames) else ExitCode.AGREE",
        "return ExitCode.NOT_RUN if codes or coverage.shortfall_lines(frames) else ExitCode.AGREE",
        "a report of an incomplete run agrees",
        "reports/test_summary.py",
    ),
    _fault(
        "run_short_is_green",
        "harness/run.py",
        "elif ExitCode.NOT_RUN in codes or chosen.missing or short:",
        "elif ExitCode.NOT_RUN in codes or chosen.missing:",
        "a run in which too little was judged is green",
        "harness/test_sessions.py",
    ),
    _fault(
        "cli_exit_code_lost",
        "harness/cli/running.py",
        "show(request, summary, outlets, as_json=as_json)\n    raise typer.Exit(summary.exit_code)",
        "show(request, summary, outlets, as_json=as_json)\n    raise typer.Exit(int(not summary.evaluations))",
        "`attncheck check` exits with 0 whatever it found",
        "harness/test_cli.py",
    ),
)


@dataclass(frozen=True)
class Tree:
    """A copy of the repository whose package is imported in the place of the one that is installed."""

    folder: Path

    @property
    def packages(self) -> Path:
        """Where the package is."""
        return self.folder / "build" / "packages"

    def link(self) -> None:
        """Lay the package out as it is installed."""
        package = self.packages / "attncheck"
        package.mkdir(parents=True)
        for path in (self.folder / "harness").iterdir():
            (package / path.name).symlink_to(path)
        for name in _MIRRORED:
            (package / name).symlink_to(self.folder / name)

    def occurrences(self, fault: Fault) -> int:
        """Count how often the old text is there: once, or the row is outdated."""
        path = self.folder / fault.file
        return path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else 0

    def put(self, file: str, text: str) -> None:
        """Write a file so that no compiled one is taken for it: those go by size and by seconds."""
        path = self.folder / file
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def existing(self, tests: Sequence[str]) -> list[str]:
        """Return the tests that the tree has; a file that was merged into another is looked for in its folder."""
        return [f"tests/{each}" for each in tests if (self.folder / "tests" / each).exists()]

    def folders(self, tests: Sequence[str]) -> list[str]:
        """Return the folders that mirror what is tested; of ``harness`` and ``reports`` only what is not below."""
        found = dict.fromkeys(each if not each.endswith(".py") else each.rpartition("/")[0] for each in tests)
        top = [each for each in found if each in ("harness", "reports")]
        files = [path for each in top for path in sorted((self.folder / "tests" / each).glob("test_*.py"))]
        below = self.existing([each for each in found if each not in top])
        return [*below, *(path.relative_to(self.folder).as_posix() for path in files)]

    def run(self, tests: Sequence[str], seconds: float) -> tuple[int, str]:
        """Run tests to the first that fails: pytest's exit code, -1 where the time was up, and what was printed."""
        with tempfile.TemporaryDirectory() as cache:
            variables = {
                "PYTHONPATH": str(self.packages),
                "ATTNCHECK_CACHE": cache,
                "OPENBLAS_NUM_THREADS": "1",
                "HYPOTHESIS_STORAGE_DIRECTORY": f"{cache}/hypothesis",
            }
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", _NUMPY, *tests]
            try:
                done = subprocess.run(
                    command,
                    cwd=self.folder,
                    env=os.environ | variables,
                    capture_output=True,
                    text=True,
                    timeout=seconds,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return -1, ""
            return done.returncode, done.stdout + done.stderr


_NUMPY = "not torch and not tensorflow and not jax"


def copy_tree(reference: str | None, folder: Path) -> Tree:
    """Copy the files of a commit, or of the working tree as git lists it."""
    if reference is not None:
        archive = subprocess.run(["git", "archive", reference], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
    else:
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes((ROOT / name).read_bytes())
    tree = Tree(folder)
    tree.link()
    return tree


def try_fault(tree: Tree, fault: Fault, seconds: float, *, folders: bool = True) -> tuple[str, str]:
    """Put a fault in, run the tests, and take it out: what became of it, and the test that failed or why none did."""
    if (count := tree.occurrences(fault)) != 1:
        return "outdated", f"its old text is there {count} times"
    text = (tree.folder / fault.file).read_text(encoding="utf-8")
    why = "no test fails"
    named, rest = tree.existing(fault.tests), tree.folders(fault.tests) if folders else []
    for tests in filter(None, (named, rest if rest != named else [])):
        tree.put(fault.file, text.replace(fault.old, fault.new))
        try:
            code, printed = tree.run(tests, seconds)
        finally:
            tree.put(fault.file, text)
        if code == -1:
            why = f"no test failed in {seconds:.0f} s"
        elif code:
            failed = _FAILED.findall(printed)
            if not failed:
                return "caught", f"pytest ended with {code}: {printed.strip().splitlines()[-1][:90] if printed else ''}"
            before, _ = tree.run([failed[0]], seconds)
            if before == 0 or ("[" in failed[0] and before in (4, 5)):  # an id may hold what no command line can
                return "caught", failed[0]
            why = f"{failed[0]} fails without the fault, too"
    return "missed", why


def results(
    tree: Tree, faults: Sequence[Fault], seconds: float, *, folders: bool
) -> Iterator[tuple[Fault, str, str, float]]:
    """Try faults one after the other."""
    for fault in faults:
        began = time.monotonic()
        yield fault, *try_fault(tree, fault, seconds, folders=folders), time.monotonic() - began


def main() -> int:
    """Print a line for each fault; 1 where one is not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names; default: all")
    parser.add_argument("--tree", metavar="COMMIT", help="another tree than the one that is checked out")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for the tests of a fault")
    parser.add_argument("--named", action="store_true", help="run the named tests alone, not their folders")
    parser.add_argument("--check", action="store_true", help="look for the old texts alone")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if not given.names or fault.name.startswith(tuple(given.names))]
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(given.tree, Path(folder))
        if given.check:
            outdated = [fault for fault in faults if tree.occurrences(fault) != 1]
            for fault in outdated:
                print(f"{fault.name}: {tree.occurrences(fault)} times in {fault.file}")
            return 1 if outdated else 0
        counts = {"caught": 0, "missed": 0, "outdated": 0}
        for fault, found, why, seconds in results(tree, faults, given.limit, folders=not given.named):
            counts[found] += 1
            print(f"{found:8} {fault.name:40} {seconds:5.0f} s  {why}", flush=True)
        print(", ".join(f"{number} {name}" for name, number in counts.items()))
    return 0 if counts["caught"] == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
