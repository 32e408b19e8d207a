"""Where the metrics go."""
