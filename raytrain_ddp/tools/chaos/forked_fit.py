"""A worker of a run without Ray: `fit`, in a fork of a process that has loaded this module."""

from __future__ import annotations

import os
import runpy
import sys

import matplotlib.pyplot  # noqa: F401

from raytrain_ddp import failpoints

if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    failpoints.arm_from_environment()  # the module was loaded in another environment
    # Its classes are looked up in sys.modules["__main__"] when their flags are read.
    runpy.run_module("raytrain_ddp.fit", run_name="__main__", alter_sys=True)
