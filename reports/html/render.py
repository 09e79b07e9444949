"""The HTML report: one file that needs nothing else.

Templates that were compiled before: compiling them takes longer than a report of a few cases.

What they were compiled to is code, and lies where Python keeps what it compiles modules to: beside the templates, or
where ``PYTHONPYCACHEPREFIX`` says, and nowhere if Python keeps nothing.
"""

from __future__ import annotations

import re
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b, sha256
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory

import jinja2
from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket
from markupsafe import Markup

from attncheck.reports.frames import Frames
from attncheck.reports.html.contents import BEYOND, LEVELS, NOT_JUDGED, Budget, budget_of, failing_words
from attncheck.reports.html.page import make_page

TEMPLATES = Path(__file__).parent / "templates"
_PIECES_TOGETHER = 1000
"""A template gives a piece for each of its words."""
# HTML allows none of these, not even as references.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff]")


def render_html(frames: Frames, budget: Budget | None = None) -> str:
    """Return the whole report. The same frames give the same text."""
    return "".join(html_pieces(frames, budget))


def html_pieces(frames: Frames, budget: Budget | None = None) -> Iterator[str]:
    """Give the whole report piece by piece.

    Every text that comes from a case or a framework is escaped, and the page's content security policy allows no
    script but its own and no request to anywhere.
    """
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    stream = (
        environment()
        .get_template("page.html")
        .stream(
            page=make_page(frames, budget or budget_of(len(frames.columns))),
            script=Markup(script),
            style=Markup(style),
            script_hash=b64encode(sha256(script.encode()).digest()).decode("ascii"),
            failing_words=failing_words,
            levels=[*((name, text) for _, name, text in LEVELS), BEYOND, NOT_JUDGED],
        )
    )
    stream.enable_buffering(_PIECES_TOGETHER)
    return (without_forbidden(piece) for piece in stream)


def without_forbidden(text: str) -> str:
    """Return a text without what HTML does not allow in any form."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def environment() -> Environment:
    """Return what renders the templates, every text escaped."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        bytecode_cache=CompiledTemplates(TEMPLATES),
    )


_CHECKSUM = 16
_OPTIONS = ("autoescape", "trim_blocks", "lstrip_blocks", "keep_trailing_newline", "is_async", "sandboxed", "optimized")
"""Of an environment, by which its templates are compiled."""


class CompiledTemplates(BytecodeCache):
    """Keeps what the templates of a folder were compiled to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load_bytecode(self, bucket: Bucket) -> None:
        """Take what was kept; what is damaged, or of another compiler or source, leaves the template to be compiled."""
        with suppress(OSError, NotImplementedError):
            entry = self._path(bucket).read_bytes()
            if entry[:_CHECKSUM] == self._checksum(bucket, entry[_CHECKSUM:]):
                bucket.bytecode_from_string(entry[_CHECKSUM:])

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep what a template was compiled to, where that can be written."""
        if sys.dont_write_bytecode:
            return
        code = bucket.bytecode_to_string()
        with suppress(OSError, NotImplementedError):
            path = self._path(bucket)
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=path.parent) as folder:  # of two processes each writes a whole file
                whole = Path(folder, path.name)
                whole.write_bytes(self._checksum(bucket, code) + code)
                whole.replace(path)

    def _path(self, bucket: Bucket) -> Path:
        """Return the place of one template."""
        return Path(cache_from_source(str(self._folder / f"{bucket.key}.py"))).with_suffix(".template")

    def _checksum(self, bucket: Bucket, code: bytes) -> bytes:
        options = [getattr(bucket.environment, name) for name in _OPTIONS]
        follows_from = [jinja2.__version__, sys.version, options, bucket.key, bucket.checksum]
        found = blake2b(f"{follows_from}\n".encode(), digest_size=_CHECKSUM)
        found.update(code)
        return found.digest()
