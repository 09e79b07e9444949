"""One case on one implementation as a script, which needs only NumPy and that framework."""

from attncheck.repro.writing import repro_script as repro_script
from attncheck.repro.writing import write_scripts as write_scripts
