"""The former place of raytrain_ddp/bottleneck.py, for imports that have not moved yet."""

from raytrain_ddp.bottleneck import *  # noqa: F403
