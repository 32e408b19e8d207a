"""Integrations: what needs no framework; tests/trainers has the rest."""
