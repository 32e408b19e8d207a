"""Notify: informs people when a problem begins and when it ends, without a Prometheus."""
