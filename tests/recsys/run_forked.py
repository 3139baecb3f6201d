"""Runs a script with its arguments, `words`, with its output in a pipe; see `Training` in conftest.py."""

import os
import runpy
import sys
from multiprocessing.connection import Connection

pipe: Connection = globals()["output"]
os.dup2(pipe.fileno(), 1)
pipe.close()
sys.argv = globals()["words"]
runpy.run_path(sys.argv[0], run_name="__main__")
