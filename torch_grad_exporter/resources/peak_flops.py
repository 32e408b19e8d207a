"""What GPUs can do at most: dense operations with bfloat16, or with float16 on older ones, per second, as vendors state them."""

from __future__ import annotations

# By a part of the name in PyTorch; the first that is in it counts. Where a vendor states only a number with sparsity, half of it.
PEAKS = (
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 6000 Ada", 364e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("V100 PCIE", 112e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
    ("MI325X", 1307e12),
    ("MI250X", 191.5e12),  # of one of its two dies, each of which is a device
)

# In the names of slices of a GPU, and of other GPUs with nearly the same name.
OTHERS = frozenset({"MIG", "GRID", "Ti", "SUPER", "D", "Laptop"})


def peak_of(name: str) -> float | None:
    """Return the operations per second of the device with this name, None if they are not known."""
    words = name.replace("-", " ").split()
    if not OTHERS.isdisjoint(words):
        return None
    return next((peak for part, peak in PEAKS if _within(part.split(), words)), None)


def _within(part: list[str], words: list[str]) -> bool:
    return any(words[place : place + len(part)] == part for place in range(len(words)))
