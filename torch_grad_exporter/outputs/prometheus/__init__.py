"""Prometheus text, the client's registry and the text file."""
