"""What changed between two results."""
