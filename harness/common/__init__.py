"""What every other folder uses: errors, words, the store, processors and progress."""
