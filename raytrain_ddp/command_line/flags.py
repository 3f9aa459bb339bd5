"""The former place of config/flags.py, for imports that have not moved yet."""

from raytrain_ddp.config.flags import Flag, changes, flags_of, flat, positional

__all__ = ["Flag", "changes", "flags_of", "flat", "positional"]
