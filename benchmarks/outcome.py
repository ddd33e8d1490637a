"""How a benchmark ends when nothing broke: what decides a test, and what only informs."""

from __future__ import annotations

# Exit status 1 says that bytes, memory or counts are wrong: the same on every machine, so it fails a test.
# This one says that only a time missed its bound: the machine may have been busy, so a person looks.
SLOWER = 3
