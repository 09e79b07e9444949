"""One case on one implementation as a script of its own, which needs NumPy and that framework alone."""

from attncheck.repro.writing import repro_script as repro_script
from attncheck.repro.writing import write_scripts as write_scripts
