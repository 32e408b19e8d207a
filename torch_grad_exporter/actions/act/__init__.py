"""Act: what `exporter.on` does when a rule or a condition holds."""
