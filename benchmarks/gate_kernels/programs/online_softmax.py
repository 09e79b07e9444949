"""Merges tiles of 32 keys with a running maximum."""

from speaking import online, serve

if __name__ == "__main__":
    serve(online)
