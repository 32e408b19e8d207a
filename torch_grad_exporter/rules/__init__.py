"""What is wrong right now, by the expressions of the shipped alert rules, from this process' own families.

Prometheus does this better: it asks for how long, over all ranks, and wakes somebody up. This is for whoever has none yet, and
for a look. Each rule here bears the name of an alert in `dashboards/prometheus/` and has all of its expression that one process can
judge; a test asks promtool the same. Alerts that compare ranks, lives of a process or hours have none here.
"""

from torch_grad_exporter.rules.context import THRESHOLDS, Finding, Problem, RuleContext, rule
from torch_grad_exporter.rules.values import Values
from torch_grad_exporter.rules.watch import RULES, Watch

__all__ = ["RULES", "THRESHOLDS", "Finding", "Problem", "RuleContext", "Values", "Watch", "rule"]
