"""A harness whose worker starts a program, to be killed without warning: test_workers.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

from attncheck.execution.call import WorkerProcess

worker = WorkerProcess()
child = worker.call(os.spawnlp, os.P_NOWAIT, "sleep", "sleep", "600", seconds=600)
Path("pids.new").write_text(f"{worker.pid} {child}")
Path("pids.new").rename("pids")
time.sleep(60)
