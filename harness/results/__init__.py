"""Results on disk: written as a run goes on, and read back."""

from pathlib import Path

DEFAULT_RESULTS = Path("results/latest")
"""Where a run writes by default."""
