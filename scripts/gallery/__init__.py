"""Pictures of the dashboards: `python -m scripts.gallery` starts nine kinds of runs and a real Prometheus, and draws its answers.

`asking` asks the panels' own queries, `units` writes numbers, `fields` applies what a panel says of its fields (mappings,
thresholds, overrides), `tables` joins answers to rows; `charts`, `grids` and `tiles` draw the kinds of panel on a `canvas`, `page`
puts them where Grafana would. The rules are Grafana's; the style is not.
"""
