"""The former place of raytrain_ddp/formatting.py, for imports that have not moved yet."""

from raytrain_ddp.formatting import *  # noqa: F403
