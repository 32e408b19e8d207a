"""The host's side: what samples and steps add up to."""
