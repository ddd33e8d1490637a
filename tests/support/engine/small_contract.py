"""A server on weights sent twice has the bytes, and says the words, of one that loaded them, by recipe and without.

`python small_contract.py DIRECTORY`, in an environment of its own: `test_extensions.py` runs it on a package
that lacks a folder. Prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.engine.commands import digests, forget_buckets, status, update
from support.engine.engine_host import EngineHost
from support.engine.generation import NEW_TOKENS, PROMPT, generate
from support.engine.models import MODELS, checkpoint


def said(host: EngineHost) -> Any:
    return host.call(generate, PROMPT, NEW_TOKENS)


def package_of(scheduler: Any) -> list[str]:
    import sglang_fp8rl
    from sglang_fp8rl.engine.extension import extensions

    return [sglang_fp8rl.__path__[0], *(kind.__module__ for kind in extensions())]


def main(directory: Path) -> None:
    model = MODELS["qwen3"]
    first, second = (checkpoint(directory, model, which) for which in ("first", "second"))
    with EngineHost(second) as fresh:
        expected, words = fresh.call(digests), said(fresh)
    with EngineHost(first) as host:
        package, *extensions = host.call(package_of)
        differs = host.call(digests) != expected
        host.call(forget_buckets)
        for items in (model.second, model.first, model.second):
            success, message = host.call(update, list(items.items()), "flattened_bucket")
            assert success, message
        found = host.call(status)
        print(
            json.dumps(
                {
                    "package": package,
                    "extensions": extensions,
                    "differs_before": differs,
                    "same_bytes": host.call(digests) == expected,
                    "same_words": repr(said(host)) == repr(words),
                    "replayed": found["replay"]["calls"] if "replay" in found else None,
                    "state": found.get("state"),
                    "has_kv_section": "kv_scales" in found,
                }
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
