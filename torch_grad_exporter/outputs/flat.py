"""The last values as a flat mapping of names to numbers, for loggers that know no labels: TensorBoard, W&B, MLflow and others."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch_grad_exporter.metrics.families import REMOVED, Family, Kind


def flat(families: Iterable[Family], match: str | re.Pattern[str] = "") -> dict[str, float]:
    """Return gauges and counters, each under the name of its metric and the values of its labels: `torch_grad_norm/encoder.0`.

    Left out are histograms, which are not single numbers, metrics that are facts in labels (`..._info`), and the sums over removed
    layers. `match`: a regular expression that is searched in these names.
    """
    pattern, values = re.compile(match), {}
    for family in families:
        if family.spec.kind is Kind.HISTOGRAM or family.spec.name.endswith("_info"):
            continue
        for row in family.row_numbers:
            labels = family.labels.rows[row]
            name = "/".join((family.spec.name, *filter(None, labels)))
            if REMOVED not in labels and pattern.search(name):
                values[name] = float(family.values[row])
    return values
