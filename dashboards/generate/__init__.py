"""Makes the Grafana dashboards, the alert rules and the runbook's table: `python -m dashboards.generate`, `--check` only compares.

`alerts` writes the rules that `torch_grad_exporter.rules` declares, `runbook` the page of it. One module for each dashboard;
`queries` has the pieces of PromQL, `panels` the kinds of panel, `board` what all dashboards share.
"""
