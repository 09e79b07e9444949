"""``python -m attncheck``: the same as the command ``attncheck``."""

from attncheck.cli import main

if __name__ == "__main__":
    main()
