"""Collectors: one file each, from totals to families. They touch no tensor and make no CUDA call."""
