"""How a plan is computed: on this machine, or on a cluster."""
