"""The JSON Schemas of case files and tags.yaml, as editors read them."""

from __future__ import annotations

import json

from pydantic import BaseModel

from attncheck.harness.reading.model import CaseFile, TagFile


def case_schema() -> str:
    """Return the JSON Schema of a case file, as text."""
    return _schema(CaseFile)


def tag_schema() -> str:
    """Return the JSON Schema of tags.yaml, as text."""
    return _schema(TagFile)


def _schema(model: type[BaseModel]) -> str:
    content = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
