"""Cases computed: the implementations, worker processes, and what runs inside them."""
