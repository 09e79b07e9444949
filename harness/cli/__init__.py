"""The command line: what to run is read from the arguments, everything else is done elsewhere.

One module per kind of command; help lists them in the order of these imports. Whatever takes time to import is imported
by the command that needs it; ``attncheck --help`` imports no framework, and neither NumPy nor pandas.
"""

from attncheck.cli import running as running  # isort: skip
from attncheck.cli import reporting as reporting  # isort: skip
from attncheck.cli import comparing as comparing  # isort: skip
from attncheck.cli import bisecting as bisecting  # isort: skip
from attncheck.cli import publishing as publishing  # isort: skip
from attncheck.cli import explaining as explaining  # isort: skip
from attncheck.cli import searching as searching  # isort: skip
from attncheck.cli import measuring as measuring  # isort: skip
from attncheck.cli import properties as properties  # isort: skip
from attncheck.cli import programs as programs  # isort: skip
from attncheck.cli import vectors as vectors  # isort: skip
from attncheck.cli import interchange as interchange  # isort: skip
from attncheck.cli import showing as showing  # isort: skip
from attncheck.cli import listing as listing  # isort: skip
from attncheck.cli.app import app as app
from attncheck.cli.app import main as main
