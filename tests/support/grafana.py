"""The shipped Grafana dashboards, as `dashboards.generate` reads them: its package is found from the root of the repository."""

from __future__ import annotations

from dashboards.generate.reading import ALL, FOLDER, PanelQuery, dashboards, each_panel, interpolated, panels

__all__ = ["ALL", "FOLDER", "PanelQuery", "dashboards", "each_panel", "interpolated", "panels"]
