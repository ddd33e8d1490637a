"""Whether what was unpacked fits the host: the tags of each WHEEL file."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.tags import compatible_tags, cpython_tags

HOST_PYTHON = (3, 12)
# SGLang's own wheel asks for this glibc, so nothing is gained by an older one elsewhere.
HOST_GLIBC = (2, 34)


def host_platforms() -> list[str]:
    """Platform tags of the host, newest first, legacy names included."""
    major, newest = HOST_GLIBC
    tags = [f"manylinux_{major}_{minor}_x86_64" for minor in range(newest, 4, -1)]
    legacy = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")
    return [*tags, *legacy, "linux_x86_64"]


def host_tags() -> frozenset[str]:
    """Every tag that a wheel for the host may carry, as `cp312-abi3-manylinux_2_28_x86_64`."""
    platforms = host_platforms()
    tags = [*cpython_tags(HOST_PYTHON, platforms=platforms)]
    tags += compatible_tags(HOST_PYTHON, "cp312", platforms)
    return frozenset(map(str, tags))


def wheel_file_tags(text: str) -> list[str]:
    """The `Tag:` lines of a WHEEL file, compressed sets (`py2.py3-none-any`) expanded."""
    found = []
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == "Tag":
            interpreters, abis, platforms = value.strip().split("-")
            found += [
                f"{interpreter}-{abi}-{platform}"
                for interpreter in interpreters.split(".")
                for abi in abis.split(".")
                for platform in platforms.split(".")
            ]
    return found


def fits_host(tags: Iterable[str]) -> bool:
    """True if one of a wheel's tags is one of the host's."""
    return not host_tags().isdisjoint(tags)
