"""What the user asked for: problems are reported to people, and the training is changed, which nothing else here does."""

from torch_grad_exporter.actions.act.learning_rates import ScaleLearningRate
from torch_grad_exporter.actions.act.measurements import Measurements
from torch_grad_exporter.actions.act.step_actions import Stop
from torch_grad_exporter.actions.act.trigger import Event
from torch_grad_exporter.actions.clip.clipper import Clipper
from torch_grad_exporter.actions.clip.policies import AGC, AutoClip, LayerScale, MaxNorm, MaxValue, Plateau, ZClip
from torch_grad_exporter.actions.clip.skipping import SkipAbove, SkipNonFinite, TooManySkippedSteps
from torch_grad_exporter.actions.freeze.freeze import Freeze
from torch_grad_exporter.actions.notify.notification import Notification
from torch_grad_exporter.actions.notify.notifiers import Alertmanager, Log, Notifier, Webhook
from torch_grad_exporter.actions.rollback.rollback import Rollback

__all__ = [
    "AGC",
    "Alertmanager",
    "AutoClip",
    "Clipper",
    "Event",
    "Freeze",
    "LayerScale",
    "Log",
    "MaxNorm",
    "MaxValue",
    "Measurements",
    "Notification",
    "Notifier",
    "Plateau",
    "Rollback",
    "ScaleLearningRate",
    "SkipAbove",
    "SkipNonFinite",
    "Stop",
    "TooManySkippedSteps",
    "Webhook",
    "ZClip",
]
