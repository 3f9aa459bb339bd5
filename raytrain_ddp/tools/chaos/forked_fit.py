"""A worker of a run without Ray: `fit`, in a fork of a process that has loaded this module."""

from __future__ import annotations

import os
import sys

import matplotlib.pyplot  # noqa: F401

import raytrain_ddp.driver.fit_driver
import raytrain_ddp.tasks.image_classification
import raytrain_ddp.training.loop
import raytrain_ddp.training.recording.local_session  # noqa: F401
from raytrain_ddp import failpoints
from raytrain_ddp.config.process import run_command
from raytrain_ddp.fit import main

if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    failpoints.arm_from_environment()  # the module was loaded in another environment
    run_command(main)
