"""Ranks: who they are and how they find each other, without a collective."""
