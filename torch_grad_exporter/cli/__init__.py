"""The command `torch-grad-exporter`."""
