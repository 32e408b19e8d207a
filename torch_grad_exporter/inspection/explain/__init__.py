"""Why a parameter has no gradient: a step is run once and watched."""

from torch_grad_exporter.inspection.explain.explain import explain
from torch_grad_exporter.inspection.explain.explanation import Explanation
from torch_grad_exporter.inspection.explain.places import Where
from torch_grad_exporter.inspection.explain.verdicts import Row, Verdict

__all__ = ["Explanation", "Row", "Verdict", "Where", "explain"]
