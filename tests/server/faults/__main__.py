"""`python -m faults`: write the faults into `docs/faults.md`. The tests' folders are on the path."""

from __future__ import annotations

from .table import DOCUMENT, document

if __name__ == "__main__":
    DOCUMENT.write_text(document())
