"""What a metric is, and the catalogue of all."""
