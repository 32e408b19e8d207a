"""Makes the stages of an exporter, one file for each, in the order of the data."""
