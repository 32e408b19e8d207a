"""What is wrong right now, by the expressions of the shipped alert rules, from this process' own families.

Prometheus does this better: it considers how long a state lasts, over all ranks, and notifies people. This is for users who have
no Prometheus yet, and for a quick view. Each rule has the name of an alert in `dashboards/prometheus/` and judges all of its
expression that one process can know; a test compares it with promtool. Alerts that compare ranks, restarts of a process or hours
have no rule here.
"""

from torch_grad_exporter.rules.context import THRESHOLDS, Finding, Problem, RuleContext, rule
from torch_grad_exporter.rules.values import Values
from torch_grad_exporter.rules.watch import RULES, Watch

__all__ = ["RULES", "THRESHOLDS", "Finding", "Problem", "RuleContext", "Values", "Watch", "rule"]
