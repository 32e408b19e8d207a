"""What is trained: layers, optimizers, sharding, replicas."""
