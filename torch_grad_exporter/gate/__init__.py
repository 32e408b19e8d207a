"""Gate: the verdict on a run, live or saved: by the rules, by limits, and against another run. For the command and for pytest."""
