"""The units of a run in their order, the standard ones, and designs of cases for a kernel."""
