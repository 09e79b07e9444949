"""Results judged: what agrees, what does not, and by how much."""
