"""The command line: what to run is read from the arguments, everything else is done elsewhere.

One module per kind of command (``app.MODULES``). Whatever takes time to import is imported by the command that needs
it; ``attncheck --help`` imports no framework, and neither NumPy nor pandas.
"""

from attncheck.cli.app import app as app
from attncheck.cli.app import main as main
