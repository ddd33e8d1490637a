"""Casts and splits: torch only, no host."""
