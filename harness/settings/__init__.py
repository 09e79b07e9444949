"""What a user sets: options, the project's pyproject.toml, and the words of commands."""
