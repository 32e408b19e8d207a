"""Measurements of what the exporter costs, beside what others cost; `make bench` runs them all.

Not part of the package: nothing in `torch_grad_exporter` imports it and the wheel leaves it out.
"""
