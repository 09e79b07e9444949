"""Cases computed: worker processes, what runs inside them, and the run as a whole."""
