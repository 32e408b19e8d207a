"""Rules: what is wrong with a run, as Prometheus judges it and, where that suffices, as one process judges itself.

Prometheus judges better: it considers how long a state lasts, over all ranks, and notifies people. A process judges about fifteen
rules on its own training, for users without Prometheus, the live page, notifiers, actions and the gate. These are declared in
Python, beside their PromQL; the two judgements of a rule are tests of each other. All other rules are PromQL only and stand in
`promql/*.toml`. `make dashboards` writes `dashboards/prometheus/*.alerts.yml` and the runbook's table from both.
"""

from torch_grad_exporter.rules.catalogue import RULES
from torch_grad_exporter.rules.context import THRESHOLDS, RuleContext
from torch_grad_exporter.rules.declaration import Alert, Finding, Problem, Rule, rule
from torch_grad_exporter.rules.record import JudgedAt, Record, Wrong
from torch_grad_exporter.rules.values import Values
from torch_grad_exporter.rules.watch import Watch

__all__ = [
    "RULES",
    "THRESHOLDS",
    "Alert",
    "Finding",
    "JudgedAt",
    "Problem",
    "Record",
    "Rule",
    "RuleContext",
    "Values",
    "Watch",
    "Wrong",
    "rule",
]
