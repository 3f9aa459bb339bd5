"""What config sections are checked with when they are built."""

from __future__ import annotations

from raytrain_ddp.errors import ConfigError

FREE: dict[str, bool] = {"free": True}


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raises ConfigError that names the field, the value and the rule, unless the rule holds."""
    if not holds:
        raise ConfigError(f"{field} = {value!r}: {rule}.")


def at_least(least: float, section: str, holder: object, *fields: str) -> None:
    """Requires that the fields of a section are `least` or more."""
    for name in fields:
        value = getattr(holder, name)
        require(value >= least, f"{section}.{name}", value, f"must be {least:g} or more")


def above_zero(section: str, holder: object, *fields: str) -> None:
    """Requires that the fields of a section are above 0."""
    for name in fields:
        value = getattr(holder, name)
        require(value > 0, f"{section}.{name}", value, "must be above 0")


def below_one(section: str, holder: object, *fields: str) -> None:
    """Requires that the fields of a section lie in [0, 1)."""
    for name in fields:
        value = getattr(holder, name)
        require(0 <= value < 1, f"{section}.{name}", value, "must be 0 or more and below 1")
