"""Messages between two ranks: send and recv of torch.

Each direction of each pair of ranks has a communicator and a thread of its own, a link, so that no send waits for a
receive of the same program: two ranks may both send first. A link is created by the first message.

On host memory a header with the tag and the size precedes each message. A receive takes the first message with its
tag, from its source or from any rank; messages that no receive wants yet are kept. On GPUs there are no headers: tags
are ignored, as by NCCL, and a receive must name its source.
"""

import array
import collections
import threading
import time
from typing import Any, Callable, Deque, Dict, Iterable, List, Optional, Set, Tuple

import torch

from .. import _library
from ..communicator import Communicator
from . import rendezvous
from .collectives import _target, wire
from .work import HostWork, Worker


class Served(Exception):
    """Another link has served a receive, so this link need not connect for it."""


class Receive:
    """A receive that waits for its message."""

    def __init__(self, tensor: torch.Tensor, tag: int, work: HostWork, links: Set[int]) -> None:
        self.tensor, self.tag, self.work = tensor, tag, work
        #: Links that can still bring the message.
        self.links = links

    def fits(self, source: int, tag: int) -> bool:
        """Whether it wants a message. A receive that has timed out wants none."""
        return self.tag == tag and source in self.links and not self.work.is_completed()

    def take(self, payload: torch.Tensor) -> None:
        """Ends with a message that was kept."""
        _check_size(self.tensor, payload.numel())
        self.tensor.copy_(payload.view(self.tensor.dtype).view(self.tensor.shape))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = wire(tensor)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _check_size(tensor: torch.Tensor, sent: int) -> None:
    expected = tensor.numel() * tensor.element_size()
    if sent != expected:
        raise ValueError(f"the message has {sent} bytes, the receive's tensor {expected}")


class Link:
    """Messages in one direction between this rank and a peer: a communicator and the thread that uses it."""

    def __init__(self, create: Callable[[Callable[[], None]], Communicator], name: str) -> None:
        self._create = create
        self.worker = Worker(name)
        self.comm: Optional[Communicator] = None
        #: Header of a message whose payload has not been received: tag and bytes.
        self.header: Optional[Tuple[int, int]] = None
        #: Stream of the messages, on a GPU.
        self.stream: Any = None

    def connected(self, check: Callable[[], None] = lambda: None) -> Communicator:
        """Returns the communicator, which the first call creates. `check` raises to end the wait for the peer."""
        if self.comm is None:
            self.comm = self._create(check)
        return self.comm

    def next_header(self, check: Callable[[], None]) -> Tuple[int, int]:
        """Waits for a message; returns its tag and its bytes."""
        if self.header is None:
            words = array.array("q", [0, 0])
            self.connected(check).recv(words, 0)
            self.header = (words[0], words[1])
        return self.header

    def abort(self) -> None:
        """Fails the link on both ranks."""
        if self.comm is not None:
            self.comm.abort()


class Messages:
    """All links of one rank in a process group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, check: Callable[[], None]) -> None:
        self._store, self._rank, self._size = store, rank, size
        #: Timeout of sends and receives in seconds.
        self.timeout = timeout
        self._check_group = check
        self._lock = threading.Lock()
        self._links: Dict[Tuple[str, int, int], Link] = {}
        self._waiting: List[Receive] = []
        self._kept: Dict[int, List[Tuple[int, torch.Tensor]]] = {}
        #: Messages to this rank on a GPU, all sends or all receives: is a send, tensor, work.
        self._to_self: Deque[Tuple[bool, torch.Tensor, "QueuedWork"]] = collections.deque()
        #: Whether new messages are refused, and whether those that are queued must end.
        self._closed, self._gave_up = False, False

    # ---- host memory ----

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> HostWork:
        """Sends to a rank. A message to this rank itself is copied at once."""
        if peer == self._rank:
            return self._send_to_self(tensor, tag)
        link = self._link("host", self._rank, peer)
        work = HostWork(f"a send to rank {peer}", [tensor], link.worker, self.timeout, link.abort)

        def job() -> None:
            payload = _bytes(tensor)
            comm = link.connected()
            comm.send(array.array("q", [tag, payload.numel()]), 1)
            if payload.numel():
                comm.send(payload, 1)

        link.worker.submit(work, job)
        return work

    def receive(self, tensor: torch.Tensor, source: Optional[int], tag: int) -> HostWork:
        """Receives from a rank, or from any if `source` is None."""
        sources = {peer for peer in range(self._size) if peer != self._rank} if source is None else {source}
        links = {peer: self._link("host", peer, self._rank) for peer in sorted(sources - {self._rank})}
        whom = "any rank" if source is None else f"rank {source}"
        work = HostWork(f"a receive from {whom}", [tensor], None, self.timeout, lambda: _abort(links.values()))
        wanted = Receive(tensor, tag, work, sources)
        with self._lock:
            found = self._kept_message(wanted)
            if found is None:
                self._waiting.append(wanted)
        if found is not None:
            self._end(wanted, lambda: wanted.take(found))
            return work
        for peer, link in links.items():
            pull = HostWork("a receive", None, link.worker)
            link.worker.submit(pull, lambda link=link, peer=peer: self._pull(link, peer, wanted))
        return work

    def _send_to_self(self, tensor: torch.Tensor, tag: int) -> HostWork:
        work = HostWork("a send to this rank", [tensor], None)
        payload = _bytes(tensor).clone()
        receive = self._keep(self._rank, tag, payload)
        if receive is not None:
            receive.work.source = self._rank
            self._end(receive, lambda: receive.take(payload))
        work.finish(None)
        return work

    def _kept_message(self, wanted: Receive) -> Optional[torch.Tensor]:
        for peer in sorted(wanted.links):
            messages = self._kept.get(peer, [])
            for at, (tag, payload) in enumerate(messages):
                if tag == wanted.tag:
                    wanted.work.source = peer
                    del messages[at]
                    return payload
        return None

    def _pull(self, link: Link, peer: int, wanted: Receive) -> None:
        """Receives messages of a link until `wanted` has one, from here or from another link."""

        def check() -> None:
            if not self._is_waiting(wanted):
                raise Served

        try:
            while self._is_waiting(wanted):
                tag, size = link.next_header(check)
                self._deliver(link, peer, tag, size, wanted)
        except Served:
            pass
        except BaseException as error:  # noqa: BLE001 - it belongs to the receive
            self._lose(peer, wanted, error)

    def _is_waiting(self, wanted: Receive) -> bool:
        with self._lock:
            if wanted in self._waiting and wanted.work.is_completed():
                # It has timed out.
                self._waiting.remove(wanted)
            return wanted in self._waiting

    def _deliver(self, link: Link, peer: int, tag: int, size: int, wanted: Receive) -> None:
        """Gives the message whose header has come to the first receive that wants it, or keeps it."""
        with self._lock:
            receive = next((one for one in self._waiting if one.fits(peer, tag)), None)
            if receive is not None:
                self._waiting.remove(receive)
            elif wanted not in self._waiting:
                # Another link has served the receive; the message waits for the next one.
                return
        link.header = None
        if receive is None or size != receive.tensor.numel() * receive.tensor.element_size():
            payload = torch.empty(size, dtype=torch.uint8)
            if size:
                link.connected().recv(payload, 0)
            receive = receive or self._keep(peer, tag, payload)
            if receive is not None:
                receive.work.source = peer
                self._end(receive, lambda: receive.take(payload))
            return
        receive.work.source = peer
        self._end(receive, lambda: self._receive_into(link, receive.tensor))

    def _keep(self, peer: int, tag: int, payload: torch.Tensor) -> Optional[Receive]:
        """Keeps a message, unless a receive for it has come meanwhile, which is returned."""
        with self._lock:
            receive = next((one for one in self._waiting if one.fits(peer, tag)), None)
            if receive is None:
                self._kept.setdefault(peer, []).append((tag, payload))
            else:
                self._waiting.remove(receive)
        return receive

    @staticmethod
    def _receive_into(link: Link, tensor: torch.Tensor) -> None:
        room, copy = _target(tensor)
        if room.numel():
            link.connected().recv(room.view(torch.uint8), 0)
        copy()

    @staticmethod
    def _end(receive: Receive, step: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                step()
        except BaseException as error:  # noqa: BLE001 - it belongs to the program's receive
            receive.work.finish(error)
        else:
            receive.work.finish(None)

    def _lose(self, peer: int, wanted: Receive, error: BaseException) -> None:
        """Fails a receive when the last link that could serve it has failed."""
        with self._lock:
            wanted.links.discard(peer)
            is_lost = wanted in self._waiting and not wanted.links
            if is_lost:
                self._waiting.remove(wanted)
        if is_lost:
            wanted.work.finish(error)

    # ---- GPUs ----

    def queue(self, tensor: torch.Tensor, peer: int, is_send: bool) -> HostWork:
        """Queues a send or a receive on the link's stream, after the work on the current stream."""
        device = tensor.device
        if peer == self._rank:
            return self._queue_to_self(tensor, is_send)
        ends = (self._rank, peer) if is_send else (peer, self._rank)
        link = self._link("cuda", *ends, device=device)
        if link.stream is None:
            link.stream = torch.cuda.Stream(device)
        before = torch.cuda.current_stream(device).record_event()
        tensor.record_stream(link.stream)
        work = QueuedWork(f"a message with rank {peer}", [tensor], link.stream, link, self.timeout)

        def job() -> None:
            comm = link.connected()
            with torch.cuda.device(device), torch.cuda.stream(link.stream):
                link.stream.wait_event(before)
                if is_send:
                    comm.send(wire(tensor), 1, stream=link.stream)
                else:
                    room, copy = _target(tensor)
                    comm.recv(room, 0, stream=link.stream)
                    copy()
                work.event = link.stream.record_event()

        link.worker.submit(work, job)
        return work

    def _queue_to_self(self, tensor: torch.Tensor, is_send: bool) -> HostWork:
        """Copies on the current stream: the second of a send and a receive does it."""
        stream = torch.cuda.current_stream(tensor.device)
        work = QueuedWork("a message to this rank", [tensor], stream, None, self.timeout)
        with self._lock:
            # Receives that have timed out want no message.
            while self._to_self and not self._to_self[0][0] and self._to_self[0][2].has_ended():
                self._to_self.popleft()
            is_second = bool(self._to_self) and self._to_self[0][0] != is_send
            if is_second:
                _, other, first = self._to_self.popleft()
            else:
                # The sender may reuse its tensor at once.
                self._to_self.append((is_send, tensor.clone() if is_send else tensor, work))
        if not is_second:
            work.event = stream.record_event()
            if is_send:
                work.finish(None)
            return work
        source, target = (tensor, other) if is_send else (other, tensor)
        if source.numel() != target.numel() or source.dtype != target.dtype:
            sizes = f"{source.numel()} {source.dtype} sent, {target.numel()} {target.dtype} received"
            error = ValueError(f"a message to this rank: {sizes}")
            first.finish(error)
            raise error
        stream.wait_event(first.event)
        with torch.no_grad():
            target.copy_(source.view(target.shape))
        first.event = work.event = stream.record_event()
        for one in (first, work):
            one.finish(None)
        return work

    # ---- links ----

    def _link(self, kind: str, sender: int, receiver: int, device: Optional[torch.device] = None) -> Link:
        with self._lock:
            if self._closed:
                raise RuntimeError("the process group was destroyed")
            key = (kind, sender, receiver)
            if key not in self._links:
                name = f"cinch {kind} {sender}->{receiver}"
                self._links[key] = Link(lambda check: self._create(kind, sender, receiver, device, check), name)
            return self._links[key]

    def _create(
        self, kind: str, sender: int, receiver: int, device: Optional[torch.device], check: Callable[[], None]
    ) -> Communicator:
        peer = receiver if self._rank == sender else sender

        def check_both() -> None:
            check()
            self._check()

        return rendezvous.connect(
            self._store,
            f"cinch/{kind}/{sender}-{receiver}",
            0 if self._rank == sender else 1,
            2,
            self.timeout,
            check_both,
            f"rank {peer}",
            device="host" if device is None else f"cuda:{device.index}",
            # Waits for a header may last; the timeout of torch is that of the works.
            timeout=rendezvous.LONGEST if device is None else min(self.timeout, rendezvous.LONGEST),
            name=f"message {sender} to {receiver}",
        )

    def _check(self) -> None:
        """Ends waits in the store when the group has failed or was destroyed."""
        if self._gave_up:
            raise _library.AbortedError("the process group was destroyed")
        self._check_group()

    def abort(self) -> None:
        """Fails all links."""
        with self._lock:
            links = list(self._links.values())
        _abort(links)

    def close(self, timeout: float) -> None:
        """Ends all links: sends end first, within the timeout; receives that still wait are aborted."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closed = True
            links = list(self._links.items())
        sends = [link for (_, sender, _), link in links if sender == self._rank]
        receives = [link for (_, sender, _), link in links if sender != self._rank]
        open_links = [link for link in sends if not link.worker.close(max(0.0, deadline - time.monotonic()))]
        # Ends links that wait for their peers.
        self._gave_up = True
        open_links += [link for link in receives if not link.worker.close(0)]
        _abort(open_links)
        deadline = time.monotonic() + timeout
        for _, link in links:
            link.worker.close(max(0.0, deadline - time.monotonic()))
            if link.comm is not None:
                link.comm.destroy()


def _abort(links: Iterable[Link]) -> None:
    for link in links:
        link.abort()


class QueuedWork(HostWork):
    """A message on a GPU: `wait` waits until it is queued, and makes the current stream wait for it."""

    def __init__(
        self,
        what: str,
        outputs: Any,
        stream: Any,
        link: Optional[Link] = None,
        timeout: Optional[float] = None,
    ) -> None:
        if link is None:
            super().__init__(what, outputs, None, timeout)
        else:
            super().__init__(what, outputs, link.worker, timeout, link.abort)
        self._link, self._stream = link, stream
        #: Event behind the message.
        self.event: Any = None

    def after_end(self) -> None:
        """Makes the current stream wait."""
        if self._link is not None:
            self._link.connected().check()
        torch.cuda.current_stream(self._stream.device).wait_event(self.event)

    def is_completed(self) -> bool:
        """Whether the message has moved, or failed."""
        return self.has_ended() and (self.exception() is not None or self.event.query())

    def new_future(self) -> torch.futures.Future:
        """Creates a future whose users' streams wait for the message."""
        return torch.futures.Future(devices=[self._stream.device])

    def _fulfil(self, future: torch.futures.Future) -> None:
        # The future records events on the current stream, which its users' streams wait for.
        with torch.cuda.stream(self._stream):
            super()._fulfil(future)
