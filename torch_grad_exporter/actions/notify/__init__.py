"""Notify: tells people when a problem begins and when it ends, without a Prometheus."""
