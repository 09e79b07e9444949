"""What a run asks of whom: units in their order, the standard ones, and designs of cases for a kernel."""
