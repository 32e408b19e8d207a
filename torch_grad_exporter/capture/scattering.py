"""A fixed, scattered pattern of numbers, the same on each rank and in each run."""

from __future__ import annotations


def scattered(number: int, level: int = 0) -> int:
    """A fixed pseudo-random 32-bit number for each number and level; 0 for 0, so that the first round is sampled."""
    if number == 0:
        return 0
    number = number * 16 + level
    mixed = (number ^ (number >> 4)) * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA6B & 0xFFFFFFFF
    return mixed ^ (mixed >> 13)
