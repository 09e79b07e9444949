"""Code that all other folders use: errors, words, the store, processors and progress."""
