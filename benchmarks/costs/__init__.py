"""What single things cost: a sample by its parts, a step without a sample, a scrape, an observed value.

`python -m benchmarks.costs` measures them all, `python -m benchmarks.costs sample` one of them.
"""
