"""PyTorch's side: when gradients are read, and which."""
