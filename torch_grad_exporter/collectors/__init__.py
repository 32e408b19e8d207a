"""Collectors: one file each, from totals or from the machine to families. They touch no tensor and make no CUDA call."""

NAMES = ("gradients", "training", "cuda_memory", "gpu", "process", "host", "container", "whole_run", "exporter")
"""All collectors, in the order of the scrape; each can be switched off, and on."""

DEFAULT = frozenset(NAMES) - {"whole_run"}
"""Those that are on if nobody says otherwise."""
