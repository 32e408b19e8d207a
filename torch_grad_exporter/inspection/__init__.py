"""What looks inside of a training on request: why a parameter has no gradient, and the tensors of inner modules."""
