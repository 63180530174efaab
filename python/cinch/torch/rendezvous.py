"""Creates communicators whose ids travel through torch's store, and a store from the launcher's environment."""

import datetime
import os
import socket
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist

from .. import _library
from ..communicator import Communicator, init, unique_id

#: Pauses between two looks into the store, in seconds. A blocking read would hold the store's connection, which other
#: threads of this process need.
FIRST_PAUSE, LAST_PAUSE = 0.001, 0.05
#: Largest timeout of cinch, in seconds: 10^9 ms.
LONGEST = 1e6


def wait_for(store: Any, key: str, timeout: float, check: Callable[[], None], failure: str) -> bytes:
    """Returns the value of a key, as soon as a rank has set it. `check` raises to end the wait.

    `failure` is the clause of the timeout's error, such as "rank 0 has not offered a communicator".
    """
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE
    while not store.check([key]):
        check()
        if time.monotonic() > deadline:
            raise _library.TimeoutError(f"{failure} within {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)
    return store.get(key)


def connect(
    store: Any,
    key: str,
    rank: int,
    size: int,
    init_timeout: float,
    check: Callable[[], None] = lambda: None,
    what: Optional[str] = None,
    **settings: Any,
) -> Communicator:
    """Creates a communicator of `size` ranks. Rank 0 puts the id under `key` into the store; the others read it."""
    if rank == 0:
        identity = unique_id()
        store.set(key, identity.hex())
    else:
        failure = f"{what or 'rank 0 of the group'} has not offered a communicator"
        found = wait_for(store, key, init_timeout, check, failure)
        identity = bytes.fromhex(found.decode())
    return Communicator(identity, rank, size, init_timeout=min(init_timeout, LONGEST), **settings)


def missing(store: Any, keys: Dict[int, str], timeout: float, first_only: bool) -> List[int]:
    """Waits for the keys of ranks; returns the ranks whose keys are absent after the timeout, or the first of them."""
    deadline = time.monotonic() + timeout
    absent = sorted(keys)
    while absent and time.monotonic() < deadline:
        absent = [rank for rank in absent if not store.check([keys[rank]])]
        if absent:
            time.sleep(0.01)
    return absent[:1] if first_only else absent


def all_come(store: Any, key: str, size: int, timeout: float, check: Callable[[], None]) -> bool:
    """Waits until all ranks have called it. Returns whether they have before the timeout.

    It returns False also if the store has ended, or when `check` raises an error of cinch.
    """
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE
    try:
        count = store.add(key, 1)
        while count < size and time.monotonic() < deadline:
            check()
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)
            count = store.add(key, 0)
    except RuntimeError:
        # Errors of cinch are RuntimeErrors, as is that of a store whose server has ended.
        return False
    return count >= size


def from_launcher(url: str, timeout: datetime.timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[Tuple]:
    """Handles `init_method="cinch://"`: ranks of cinch run, mpirun or srun, without MASTER_ADDR and MASTER_PORT.

    Yields a store that rank 0 serves, the rank and the number of ranks.
    """
    limit = min(timeout.total_seconds(), LONGEST)
    with init(timeout=limit, init_timeout=limit, device="host") as comm:
        text = torch.zeros(256, dtype=torch.uint8)
        store = None
        if comm.rank == 0:
            store = dist.TCPStore("0.0.0.0", 0, comm.size, True, timeout, wait_for_workers=False)
            address = f"{_address(comm.size)} {store.port}".encode()
            text[: len(address)] = torch.tensor(list(address), dtype=torch.uint8)
        comm.broadcast(text)
        host, port = bytes(text.tolist()).rstrip(b"\0").decode().split()
        if store is None:
            store = dist.TCPStore(host, int(port), comm.size, False, timeout, wait_for_workers=False)
        rank, size = comm.rank, comm.size
    yield store, rank, size


def _address(size: int) -> str:
    """Returns the name under which other ranks reach this host."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        return "127.0.0.1"
    return os.environ.get("MASTER_ADDR") or socket.getfqdn()
