"""One file for each framework, imported by name alone; each is a thin caller of the public interface."""
