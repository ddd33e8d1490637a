"""`python -m tools.census.checkpoints DIRECTORY CLASS...`: the census's small models, for a real server.

Each class gets a folder with three weight sets (`judge.saved`). Exit status: 0 all are there; 1 one is not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .pool import LIMIT_SECONDS
from .preload import import_sglang, prepare_environment


def main(directory: Path, architectures: list[str]) -> int:
    prepare_environment()
    import_sglang()
    from .configs import warm_up
    from .worker import row_of

    warm_up()
    missing = 0
    for one in architectures:
        row = row_of(one, LIMIT_SECONDS, save_to=directory / one)
        if not row.names:
            print(f"{one}: {'; '.join(row.reasons)}", file=sys.stderr)
            missing += 1
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
