"""Integrations: one file for each framework, by the public interface alone."""
