"""Published documents, transcribed with the numbers that they print; one file each."""
