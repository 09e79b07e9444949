"""Attention: its steps, each with all of its rules, the graph that they make, and the walk over it."""
