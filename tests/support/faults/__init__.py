"""What goes wrong with a refit, as a table: one row for each fault (`table.py` has them all).

A row says what happens (its name), what the client is told, and what is served and said afterwards. The
same rows run on a server (`test_faults.py`), in part on an engine (`tests/engine/test_faults_engine.py`),
and are the table of docs/faults.md (`python -m support.faults`, from `tests`).
"""
