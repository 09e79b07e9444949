"""What an implementation that fails does instead: the catalogue of readings, and how one is chosen."""
