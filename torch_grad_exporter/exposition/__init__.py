"""The outputs: what turns families into Prometheus text, into `prometheus_client` metrics and into HTTP answers.

Nothing in here imports torch, and no output reads another one.
"""
