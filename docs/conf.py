"""How Sphinx makes a site of the documentation: ``sphinx-build -W -n docs build/site``."""

import shutil
import subprocess
import sys
from importlib.metadata import version as installed
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
from site_tables import write_tables
from trade_curves import write_trades

from attncheck.reading.schema import case_file_schema

write_tables(Path(__file__).parents[1] / "build" / "tables")
write_trades(Path(__file__).parents[1] / "build" / "trades")

project = "attncheck"
author = "the attncheck developers"
version = release = installed("attncheck")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# Options and quotes in tables are to be copied: -- and " stay as they are.
smartquotes = False
# A page may leave out a level where a table of the specification comes between.
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# The theme brings all that it needs: neither the build nor a reader's browser fetches anything from elsewhere.
html_theme = "furo"
html_title = "attncheck"


def _draw_documents(app: Sphinx, exception: Exception | None) -> None:
    """Put the report of the published documents, with every number and picture, beside the pages of the site."""
    if exception is None and app.builder.format == "html":
        results = Path(app.doctreedir) / "documents"
        check = [sys.executable, "-m", "attncheck", "check", "documents/*", "--backend", "numpy", "--quiet"]
        subprocess.run([*check, "--output", str(results)], check=True)
        shutil.copy(results / "report" / "report.html", Path(app.outdir) / "documents.html")


def _write_schema(app: Sphinx, exception: Exception | None) -> None:
    """Publish the JSON Schema of case files with the pages."""
    if exception is None and app.builder.format == "html":
        (Path(app.outdir) / "schema.json").write_text(case_file_schema(), encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Register what the build does beside its pages."""
    app.connect("build-finished", _draw_documents)
    app.connect("build-finished", _write_schema)
