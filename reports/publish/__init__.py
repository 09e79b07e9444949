"""The comparison that the repository keeps, and its check."""
