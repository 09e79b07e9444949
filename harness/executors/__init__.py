"""Executors compute a plan: on this machine, or on a cluster."""
