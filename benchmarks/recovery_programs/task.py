"""The task of launch.py, which has each process stamp its way; see site/stamping.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "site"), str(HERE.parent)]
import stamping  # noqa: E402, F401
from launch_task import LaunchTask  # noqa: E402, F401
