"""Whether a bar is kept, as far as a measurement can tell."""

from __future__ import annotations


def verdict(low: float, high: float, bar: float) -> str:
    """`yes` or `no` only if the whole interval lies on one side of the bar."""
    return "yes" if high <= bar else "no" if low > bar else "unclear"
