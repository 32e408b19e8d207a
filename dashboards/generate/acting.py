"""The row of the dashboard "Exporter" about what it does itself: actions, rollbacks, notifications, problems that were found."""

from __future__ import annotations

from dashboards.generate import panels as draw
from dashboards.generate.panels import Panel, Query
from dashboards.generate.queries import equal, events, highest, of_rank, of_run

SEVERITIES = {3: ("Critical", "red"), 2: ("Warning", "orange"), 1: ("Info", "blue")}


def _actions() -> Panel:
    query = Query(events(of_rank("torch_grad_exporter_actions_total"), "run, action, result"), "{{run}} {{action}} {{result}}")
    text = (
        "What exporter.on was asked to do, in each interval, over the chosen ranks: done, failed because it raised, refused "
        "because the ranks did not agree on a step, or dropped. The annotation Actions marks what was done, on all dashboards."
    )
    panel = draw.lines("Actions", text, "short", query, nothing="No action was due, or no run has exporter.on(...)", many=True)
    return draw.bars(panel)


def _notifications() -> Panel:
    query = Query(events(of_rank("torch_grad_exporter_notifications_total"), "run, sink, result"), "{{run}} {{sink}} {{result}}")
    text = (
        "Notifications of each notifier in each interval, over the chosen ranks: sent, failed after all tries, or dropped. A "
        "problem that begins is one, so is its end, and each repetition to an Alertmanager."
    )
    nothing = "Nothing was sent, or no run has start_exporter(alerts=...)"
    return draw.bars(draw.lines("Notifications", text, "short", query, nothing=nothing, many=True))


def _problems() -> Panel:
    by_severity = {name.lower(): number for number, (name, _) in SEVERITIES.items()}
    each = " or ".join(
        f"({highest(of_rank('torch_alerts_active', equal('severity', name)), 'run, alert')} > 0) * 0 + {number}"
        for name, number in by_severity.items()
    )
    text = (
        "Alerts that processes have found by themselves and sent through alerts=, at their gravest: of the chosen ranks. Those of "
        "Prometheus, which knows more, are on the dashboard Training overview."
    )
    nothing = "No problem was found"
    return draw.timeline("Problems found by processes", text, Query(each, "{{run}} {{alert}}"), SEVERITIES, nothing)


def _rollbacks() -> Panel:
    query = Query(events(of_run("torch_train_rollbacks_total"), "run, reason", "max"), "{{run}} {{reason}}")
    text = "How often Rollback took a training back to a copy, in each interval, by what was wrong. All ranks go back together."
    nothing = "Nothing went back, or no run has exporter.on(Rollback(...))"
    return draw.bars(draw.lines("Rollbacks", text, "short", query, nothing=nothing, many=True))


def row() -> list[Panel]:
    """All of them."""
    return [_actions(), _notifications(), _problems(), _rollbacks()]
