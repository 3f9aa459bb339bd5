"""Python imports it at its start; see stamping.py."""

import stamping  # noqa: F401
