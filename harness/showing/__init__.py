"""Output of commands that compute themselves: a case, an explanation, a search; for people and as JSON."""
