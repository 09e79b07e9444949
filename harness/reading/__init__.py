"""Cases read from YAML: checked, frozen, and turned into numbers."""
