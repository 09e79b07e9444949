"""Probes: small cases by topic, each aimed at a defect that was met in real code; its tags say which."""
