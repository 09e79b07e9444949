"""Numbers from and for elsewhere: calls in a user's model, vectors for other tests."""
