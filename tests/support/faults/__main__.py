"""`python -m support.faults`, from `tests`: write the faults into `docs/faults.md`."""

from __future__ import annotations

from .table import DOCUMENT, document

if __name__ == "__main__":
    DOCUMENT.write_text(document())
