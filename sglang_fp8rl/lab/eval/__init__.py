"""Measuring a served model: AIME-style accuracy, and the gap to a `transformers` model."""
