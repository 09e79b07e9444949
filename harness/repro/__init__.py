"""Scripts for bug reports: one case on one implementation, with NumPy and that framework alone."""

from attncheck.harness.repro.script import repro_script

__all__ = ["repro_script"]
