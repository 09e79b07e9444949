"""What the rows of a failing case carry, so that all cases of a run can decide together (``diagnosis.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from attncheck.judging.diagnosis import Plain, evidence_of, pack
from attncheck.judging.judge_implementation import DIAGNOSABLE, JudgedStages
from attncheck.judging.judge_stages import StageJudgement
from attncheck.results.format import Row


def with_evidence(rows: Sequence[Row], judged: JudgedStages, explain: Callable[[StageJudgement], str]) -> list[Row]:
    """Let rows that fail carry what the case says of its implementation, and how they read without a name.

    ``explain`` returns the message of a judgement, with the element that it names.
    """
    failing = [row for row in rows if row.verdict in DIAGNOSABLE and not row.xfail]
    if not failing or not (judged.findings.fits or judged.findings.refuted):
        return list(rows)
    evidence = evidence_of(judged.findings, failing[0].stage, failing[0].operation)
    plain = {each.stage: each for each in judged.plain or judged.judgements}
    begins_at = judged.plain_begins_at or judged.begins_at

    def packed(row: Row) -> str:
        judgement = plain[row.stage]
        return pack(evidence, Plain(judgement.verdict, explain(judgement), begins_at, row.message))

    named = judged.diagnosis.name if judged.diagnosis is not None else None
    return [replace(row, diagnosis=named, evidence=packed(row)) if row in failing else row for row in rows]
