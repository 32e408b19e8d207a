"""The programs of `statistics/kernels/` by Triton's interpreter: `make kernels`, with Triton in `.tools/triton`."""
