"""Templates that were compiled before: compiling them takes longer than a report of a few cases.

What they were compiled to is code, and lies where Python keeps what it compiles modules to: beside the templates, or
where ``PYTHONPYCACHEPREFIX`` says, and nowhere if Python keeps nothing.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from hashlib import blake2b
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory

import jinja2
from jinja2 import BytecodeCache
from jinja2.bccache import Bucket

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
