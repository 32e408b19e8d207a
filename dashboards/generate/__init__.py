"""Makes the Grafana dashboards: `python -m dashboards.generate` writes them, with `--check` it only compares.

One module for each dashboard; `queries` has the pieces of PromQL, `panels` the kinds of panel, `board` what all dashboards share.
"""
