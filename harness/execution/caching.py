"""Where frameworks keep what they compiled, from one run to the next: in the user's own cache folder.

What is cached is the compiler's output, by a key of program, versions and flags; the numbers stay the same. A folder is
for one version of the framework on CPUs of one kind: machine code of another kind would end the process.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from attncheck.backends import BACKENDS, BackendEntry
from attncheck.execution.environment import cpu_features, package_version

Entry = TypeVar("Entry", bound=BackendEntry)

VARIABLE = "ATTNCHECK_CACHE"
"""Names another folder than the user's cache folder."""


def cache_folder() -> Path:
    """Return the folder below which frameworks keep what they compiled; it may be deleted at any time."""
    import platformdirs

    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("attncheck"))


def with_cache(entry: Entry, *, keep: bool) -> Entry:
    """Add the variables by which its framework keeps what it compiles, or with ``keep`` false does not.

    What the user's environment says already stands. Without a folder that can be written nothing is kept.
    """
    framework = next((known for known in BACKENDS.values() if known.packages == entry.packages), entry)
    variables = _kept(framework) if keep else framework.without_cache
    added = {name: text for name, text in variables.items() if name not in os.environ}
    return replace(entry, environment={**entry.environment, **added}) if added else entry


def _kept(framework: BackendEntry) -> Mapping[str, str]:
    # Reading kernels back from the cache overflows a thread's stack on macOS with jaxlib before 0.10.
    if not framework.cache or sys.platform == "darwin":
        return {}
    folder = cache_folder() / _kind(framework.packages[0])
    with suppress(OSError):
        # Whoever may write there may run code here.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        return {}
    return {name: text.format(folder=folder) for name, text in framework.cache.items()}


@lru_cache
def _kind(package: str) -> str:
    cpu = hashlib.sha256("\n".join([platform.machine(), *cpu_features()]).encode()).hexdigest()[:12]
    return f"{package}-{package_version(package)}-{platform.python_version()}-{cpu}"
