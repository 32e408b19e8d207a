"""The host's side: records of the training thread, and the totals that the worker makes of them."""
