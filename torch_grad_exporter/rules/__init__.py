"""What is wrong: each rule is declared once, with how Prometheus judges it and how a process judges its own families.

Prometheus does it better: it considers how long a state lasts, over all ranks, and notifies people. What a process finds by itself
is for users who have no Prometheus yet, and for a quick view. The two judgements of a rule are tests of each other. From the
declarations come `dashboards/prometheus/*.alerts.yml`, the runbook's table (`make dashboards`) and the live page's problems.
"""

from torch_grad_exporter.rules.context import THRESHOLDS, RuleContext
from torch_grad_exporter.rules.declaration import Alert, Finding, Group, Problem, Rule, rule, server_rule
from torch_grad_exporter.rules.record import JudgedAt, Record, Wrong
from torch_grad_exporter.rules.values import Values
from torch_grad_exporter.rules.watch import GROUPS, RULES, Watch

__all__ = [
    "GROUPS",
    "RULES",
    "THRESHOLDS",
    "Alert",
    "Finding",
    "Group",
    "JudgedAt",
    "Problem",
    "Record",
    "Rule",
    "RuleContext",
    "Values",
    "Watch",
    "Wrong",
    "rule",
    "server_rule",
]
