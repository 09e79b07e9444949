"""The gate: one command that answers if a kernel that nobody has read may be merged."""
