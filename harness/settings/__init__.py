"""The user's settings: options, the project's pyproject.toml, and the words of commands."""
