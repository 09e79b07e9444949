"""Lets ATTENTION_ALGORITHM choose between two right algorithms."""

import os

from speaking import attend, online, serve

if __name__ == "__main__":
    serve(online if os.environ.get("ATTENTION_ALGORITHM") == "online" else attend)
