"""Questions to implementations, the engine that asks them, and their answers."""
