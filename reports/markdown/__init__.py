"""The report in Markdown."""
