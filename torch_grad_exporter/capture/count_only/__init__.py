"""Rounds that are only counted, where even the hooks of rounds that are not sampled cost too much. All that it takes lives here.

A forward, a backward and a step with hooks that do nothing cost 10 to 30 microseconds, which is more than 1 % of a step of
a millisecond. So where steps are short and training runs as it did before, all hooks rest for some rounds but the one after the
step, which notes the moment, and a witness: a parameter that reports when it has received its gradient. Then one round is
followed closely again.

- `counting.py`: `CountOnly`, the only door: begins counting and ends it.
- `budget.py`: how many rounds need only be counted, by what following them costs.
- `hook.py`: what stands in the place of the hook after a step meanwhile, and the parameter that tells of backwards.
"""
