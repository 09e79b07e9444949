"""The one self-contained HTML report: what each section shows, and the templates that show it."""
