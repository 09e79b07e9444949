"""What the mutation score keeps in a store: what was found of returned bits, never the bits that a variant returns.

All that was found of one kind in one unit (a case in one dtype and seed) is one entry, by the digest of what was
returned and of the rounding model by which it was judged. It follows from the numbers of the case and from the code
that judges, so that a changed variant, or a new one, is judged where it returns what no other one did.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

from attncheck.judging.diagnosis import Evidence, Fit
from attncheck.judging.remembered import key_of
from attncheck.mutation.findings import Findings, StageResult
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.store import Key, Store, UnreadableEntry, digest_of_code

MAX_FOUND = 1 << 12
"""How much is kept of a unit before what nobody asked for is dropped; the catalogue has fewer variants."""

_CODE = tuple(f"attncheck.mutation.{name}" for name in ("findings", "judgement", "remembered", "rules", "unit"))

Found = TypeVar("Found")


@dataclass(frozen=True)
class Kind(Generic[Found]):
    """What is found of returned bits, and how it is written as plain data."""

    name: str
    encode: Callable[[Found], Any]
    decode: Callable[[Any], Found]

    def written(self, known: Mapping[str, Found]) -> bytes:
        """Write down what is known by digest."""
        return zlib.compress(json.dumps({digest: self.encode(found) for digest, found in known.items()}).encode(), 1)

    def known(self, data: bytes) -> dict[str, Found]:
        """Read what was written. Raises ``UnreadableEntry``."""
        try:
            return {str(digest): self.decode(found) for digest, found in json.loads(zlib.decompress(data)).items()}
        except (zlib.error, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnreadableEntry from error


@dataclass(eq=False)
class RememberedUnit(Generic[Found]):
    """What is known of one unit, by digest."""

    kind: Kind[Found]
    store: Store
    key: Key | None
    _known: dict[str, Found] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _is_changed: bool = False

    def get(self, digest: str, find: Callable[[], Found]) -> Found:
        """Return what is known of returned bits, or else what is found of them now."""
        self._asked.add(digest)
        if digest not in self._known:
            self._known[digest] = find()
            self._is_changed = True
        return self._known[digest]

    def keep(self) -> None:
        """Keep what was found."""
        if self.key is None or not self._is_changed:
            return
        kept = self._known
        if len(kept) > MAX_FOUND:
            kept = {digest: found for digest, found in kept.items() if digest in self._asked}
        self.store.put(self.key, self.kind.written(kept))


def remembered_unit(kind: Kind[Found], store: Store, case: Case, dtype: str, inputs: Inputs) -> RememberedUnit[Found]:
    """Return what a store knows of a unit; nothing where that is damaged, or was found by other code."""
    if store.folder is None:
        return RememberedUnit(kind, store, None)
    key = key_of(f"faults-{kind.name}", _version(), case.digest, dtype, inputs)
    data = store.get(key)
    try:
        known = {} if data is None else kind.known(data)
    except UnreadableEntry:
        store.note_damaged()
        known = {}
    return RememberedUnit(kind, store, key, known)


@lru_cache
def _version() -> str:
    return digest_of_code(_CODE, ())


def _findings(plain: Any) -> Findings:
    return tuple(StageResult(*each) for each in plain)


def _plain(evidence: Evidence | None) -> Any:
    return None if evidence is None else {**asdict(evidence), "refuted": sorted(evidence.refuted)}


def _evidence(plain: Any) -> Evidence | None:
    if plain is None:
        return None
    fits = tuple(Fit(**each) for each in plain["fits"])
    return Evidence(fits, frozenset(plain["refuted"]), plain["failing"], plain["operation"])


FINDINGS: Kind[Findings] = Kind("findings", lambda findings: findings, _findings)
EVIDENCE: Kind[Evidence | None] = Kind("evidence", _plain, _evidence)
