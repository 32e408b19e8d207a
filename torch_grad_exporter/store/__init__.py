"""Between the training thread and the host side: buffers and records."""
