"""``python -m attncheck.harness``: the same as the command ``attncheck``."""

from attncheck.harness.cli import main

if __name__ == "__main__":
    main()
