"""Servers that tests share, and trainers that talk to them."""
