"""The survey: every implementation that was ever judged, what it can do, how exact it is, and what it means."""
