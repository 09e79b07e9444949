"""Results on disk: written as a run goes on, and read back."""
