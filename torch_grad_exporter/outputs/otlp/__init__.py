"""Push over OTLP."""
