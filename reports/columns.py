"""The columns of the frames: what each means, and which frame has which, in order.

Parquet holds every text as it is. CSV is for spreadsheets too, so there, in columns of text:

- a text that a spreadsheet would run as a formula (it begins with = + - @, a tab or a line break) has an apostrophe
  before it, and so has what stands like that after a semicolon, a tab or a line break within a text; a number that is
  written as text, such as -0.25 in ``printed``, stays as it is;
- line breaks are single line feeds, inside quotes; other control characters are replacement characters (U+FFFD);
- an empty text is a pair of quotes, and no value at all is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from attncheck.harness.vocabulary import OPERATIONS

COLUMNS: Mapping[str, str] = {
    "environment": "label of the run",
    "implementation": "backend and mode",
    "version": "version of the implementation's framework",
    "case": "id of the case: its file, then its name",
    "operation": ", ".join(OPERATIONS),
    "dtype": "working dtype of inputs and results",
    "stage": "named intermediate, or derived quantity; empty where the whole case failed",
    "verdict": "one word, see the README",
    "known": "recorded beforehand, does not fail a run",
    "shape": "lengths of the stage's axes",
    "index": "element where the two differ most, or the number's place",
    "value": "the implementation's number there",
    "reference": "the number that it is held against",
    "difference": "absolute difference of the two",
    "allowed": "largest difference that agrees: an error bound or the sum of two; of a number, with its rounding",
    "against": "exact or step: which comparison of a stage index, value, reference, difference and allowed are of",
    "ratio": "largest difference over what is allowed there, in the whole stage",
    "tier": "within, T3 (noisy, a warning), T2 (statistically wrong) or T1 (proved wrong), against the exact answer",
    "largest_z": "largest error in units of its statistical scale",
    "mean_z": "root mean square of the errors in units of their statistical scale",
    "introduced_tier": "the same tier for the step from the implementation's own previous stage",
    "introduced_ratio": "the same ratio for that step",
    "introduced_z": "the same largest z for that step",
    "begins_at": "the first stage that is itself at fault in this case",
    "judged_rows": "query rows that were judged, where some stand for all; empty where all were",
    "query_rows": "query rows that the stage has, where some stand for all",
    "other": "the implementation that it is compared with, and its environment",
    "message": "what is wrong, in words",
    "reason": "why it is known beforehand",
    "thread": "where that is discussed",
    "empty_rows": "what a query without a key gives (zero, uniform, nan), where nothing else differs from the case",
    "basis": "printed by the document, known by derivation, or exact: computed by the document and not printed",
    "called": "the document's own name for the stage",
    "printed": "the number as it is printed",
    "half_unit": "half a unit of the last printed digit",
    "propagated": "what the rounding of the case's inputs can move the number by",
}

RESULTS = (
    "environment",
    "implementation",
    "version",
    "case",
    "operation",
    "dtype",
    "stage",
    "verdict",
    "known",
    "shape",
    "index",
    "value",
    "reference",
    "difference",
    "allowed",
    "against",
    "ratio",
    "tier",
    "largest_z",
    "mean_z",
    "introduced_tier",
    "introduced_ratio",
    "introduced_z",
    "begins_at",
    "judged_rows",
    "query_rows",
    "message",
    "reason",
    "thread",
    "empty_rows",
)
PAIRS = (
    "case",
    "operation",
    "dtype",
    "stage",
    "environment",
    "implementation",
    "version",
    "other_environment",
    "other",
    "other_version",
    "verdict",
    "known",
    "index",
    "value",
    "reference",
    "difference",
    "allowed",
    "ratio",
    "message",
    "reason",
    "thread",
)
NUMBERS = (
    "case",
    "dtype",
    "stage",
    "called",
    "basis",
    "index",
    "printed",
    "environment",
    "implementation",
    "version",
    "value",
    "verdict",
    "known",
    "reference",
    "difference",
    "half_unit",
    "propagated",
    "allowed",
    "message",
    "reason",
    "thread",
)
