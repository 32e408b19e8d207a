"""What ends a run whose framework has no event for an exception."""

from __future__ import annotations


class TrainingBrokeOff(Exception):  # noqa: N818 - shown as what has ended a run: it names no error
    """A training ended without its last event: it raised, and the framework has no event that tells what."""
