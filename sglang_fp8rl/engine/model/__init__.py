"""The served model: its parameters, where names land, what is derived from weights."""
