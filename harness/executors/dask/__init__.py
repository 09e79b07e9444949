"""The same plan on a Dask cluster: nothing but this package imports Dask, and nobody imports this who needs none."""

from __future__ import annotations

from importlib.util import find_spec

from attncheck.common.errors import UsageError

if find_spec("distributed") is None:
    raise UsageError("--cluster needs the extra dask: pip install 'attncheck[dask]'")
