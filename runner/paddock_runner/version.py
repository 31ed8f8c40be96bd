"""Versions, as they are installed: Paddock's own, for people and for clients, and those of what it stands on."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "0.0.0+unknown"
"""Paddock's version where it is not installed (run from its folders): clients read three numbers."""


@cache
def our_version() -> str:
    """The version of Paddock."""
    return version_of("paddock") or UNKNOWN


def version_of(package: str) -> str:
    """The version of an installed package, "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
