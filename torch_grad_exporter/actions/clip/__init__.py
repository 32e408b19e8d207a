"""Clipping gradients by a policy: the policies, and the `Clipper` that applies one in the user's own loop."""

from torch_grad_exporter.actions.clip.adaptive import AutoClip, Plateau, ZClip
from torch_grad_exporter.actions.clip.clipper import Clipper
from torch_grad_exporter.actions.clip.fixed import AGC, LayerScale, MaxNorm, MaxValue
from torch_grad_exporter.actions.clip.skipping import SkipAbove, SkipNonFinite, TooManySkippedSteps

__all__ = [
    "AGC",
    "AutoClip",
    "Clipper",
    "LayerScale",
    "MaxNorm",
    "MaxValue",
    "Plateau",
    "SkipAbove",
    "SkipNonFinite",
    "TooManySkippedSteps",
    "ZClip",
]
