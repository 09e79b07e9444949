"""Properties: what must hold between two calls, asked of implementations and judged with three outcomes."""
