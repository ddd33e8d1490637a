"""What a server and its client hold: memory, file descriptors, sockets, threads and shared memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 1 << 20
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Sample:
    """After one refit.

    Attributes:
        seconds: since the soak began.
        server_mib: resident memory of the server's processes together, client_mib: of the client's.
        fds, sockets, threads: of the server's processes together.
        client_fds: of the client's.
        shm_files, shm_mib: tensors in `/dev/shm` that any of these processes put there.
        resident: MiB of each of the server's processes, by name.
    """

    seconds: float
    server_mib: float
    client_mib: float
    fds: int
    sockets: int
    threads: int
    client_fds: int
    shm_files: int
    shm_mib: float
    resident: dict[str, float]


# Quantity to its name in the report and what the last tenth may have more than the first.
ALLOWED = {
    "server_mib": ("server, MiB resident", 24.0),
    "client_mib": ("client, MiB resident", 24.0),
    "fds": ("server, file descriptors", 3.0),
    "sockets": ("server, sockets", 3.0),
    "threads": ("server, threads", 3.0),
    "client_fds": ("client, file descriptors", 3.0),
    "shm_files": ("tensors in /dev/shm", 3.0),
    "shm_mib": ("MiB in /dev/shm", 8.0),
}


class Watch:
    """Looks at the process group of a server, and at this process.

    Args:
        pid: of the server's first process.
    """

    def __init__(self, pid: int) -> None:
        self._server, self._client = psutil.Process(pid), psutil.Process(os.getpid())

    def sample(self, seconds: float) -> Sample:
        server = _family(self._server)
        client = [self._client]
        by_process = _resident_mib(server)
        shared = _shared_tensors({process.pid for process in (*server, *client)})
        return Sample(
            round(seconds, 3),
            round(sum(by_process.values()), 2),
            sum(_resident_mib(client).values()),
            _sum(server, "num_fds"),
            _sockets(server),
            _sum(server, "num_threads"),
            _sum(client, "num_fds"),
            len(shared),
            round(sum(shared) / MIB, 2),
            by_process,
        )


def _family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _sum(processes: list[psutil.Process], what: str) -> int:
    total = 0
    for process in processes:
        try:
            total += getattr(process, what)()
        except psutil.NoSuchProcess:  # it ended while we looked
            continue
    return total


def _resident_mib(processes: list[psutil.Process]) -> dict[str, float]:
    """Of each that has not ended meanwhile."""
    found = {}
    for process in processes:
        try:
            found[f"{process.name()} {process.pid}"] = process.memory_info().rss / MIB
        except psutil.NoSuchProcess:
            continue
    return {name: round(mib, 2) for name, mib in found.items()}


def _sockets(processes: list[psutil.Process]) -> int:
    total = 0
    for process in processes:
        for link in Path(f"/proc/{process.pid}/fd").glob("*"):
            try:
                total += os.readlink(link).startswith("socket:")
            except FileNotFoundError:
                continue
    return total


def _shared_tensors(pids: set[int]) -> list[int]:
    """Bytes of each; torch calls the files of a process `torch_PID_…`."""
    sizes = []
    for file in _SHARED_MEMORY.glob("torch_*"):
        maker = file.name.split("_")[1]
        try:
            if maker.isdigit() and int(maker) in pids:
                sizes.append(file.stat().st_blocks * 512)
        except FileNotFoundError:  # let go of while we looked
            continue
    return sizes
