"""Part `frames`: headers of messages over TCP, captured on the loopback interface.

A capture needs root or CAP_NET_RAW, so the part runs only when it is named.
"""

import socket
import struct
import threading
import time
from dataclasses import replace

import numpy as np

from cinch_reference import fused, messages
from cinch_reference.communicator import Arguments, Communicator
from cinch_reference.elements import BF16, F16, F32E, F64E, I32
from cinch_reference.spec import parse

from . import state
from .collectives import buffers_of, check_call, random_factors
from .compare import Result
from .library import CallArguments, Library, Ranks

IPV4, TCP, OUTGOING = b"\x08\x00", 6, 4

CALLS = [
    ("all_reduce", "direct", "linear8", F32E, "sum", 1000, 0),
    ("all_reduce", "ring", "minmax4:seed=7:block=64", BF16, "avg", 9000, 0),
    ("reduce", "tree", "threshold2:tau=0.5", F16, "sum", 500, 1),
    ("broadcast", "ring", "raw", I32, "sum", 77, 1),
    ("all_to_all", "direct", "static8:offset=-3", F32E, "sum", 40, 0),
    ("reduce_scatter", "ring", "linear8:tensor=9", F32E, "premulsum", 100, 0),
    ("all_reduce", "oneshot", "raw", F64E, "max", 30, 0),
    ("gather", "direct", "cast16", F32E, "sum", 70, 1),
]


class Capture:
    """Bytes of all TCP streams of the loopback interface, from creation to `stop`."""

    def __init__(self) -> None:
        self.streams: dict[bytes, bytearray] = {}
        self.next: dict[bytes, int] = {}
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
        self.socket.bind(("lo", 0))
        self.socket.settimeout(0.2)
        self.running = True
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while self.running:
            try:
                packet, source = self.socket.recvfrom(1 << 17)
            except TimeoutError:
                continue
            if source[2] == OUTGOING or packet[12:14] != IPV4 or packet[23] != TCP:
                continue
            header = 14 + (packet[14] & 15) * 4
            data = header + (packet[header + 12] >> 4) * 4
            end = 14 + struct.unpack(">H", packet[16:18])[0]
            sequence = struct.unpack(">I", packet[header + 4 : header + 8])[0]
            self._append(packet[header : header + 4], sequence, packet[data:end])

    def _append(self, ports: bytes, sequence: int, data: bytes) -> None:
        """Appends data to a stream, without bytes that were sent before."""
        if data:
            known = (sequence - self.next.get(ports, sequence)) % 2**32
            repeated = 2**32 - known if known >= 2**31 else 0
            self.streams.setdefault(ports, bytearray()).extend(data[repeated:])
            self.next[ports] = (sequence + max(len(data), repeated)) % 2**32

    def stop(self) -> list[bytes]:
        """Returns the captured streams."""
        time.sleep(0.5)
        self.running = False
        self.thread.join()
        self.socket.close()
        return [bytes(stream) for stream in self.streams.values()]


def frames_of(stream: bytes) -> list[bytes]:
    """Returns the frames in a stream."""
    found, at = [], stream.find(messages.MAGIC)
    while at >= 0:
        found.append(stream[at - 44 : at + 20])
        at = stream.find(messages.MAGIC, at + 4)
    return found


def run_calls(ranks: Ranks, random: np.random.Generator) -> set[bytes]:
    """Runs the calls and returns their signatures."""
    comm, expected = Communicator(ranks.size, 4096), set()
    for sequence, (collective, algorithm, spec, element, op, count, root) in enumerate(CALLS):
        factors = random_factors(element, random, ranks.size) if op == "premulsum" else None
        arguments = Arguments(collective, element, count, algorithm, op, parse(spec), root=root)
        arguments = replace(arguments, factors=factors, tensor=5 if "tensor" in spec else 0)
        check_call(Result("call"), ranks, comm, arguments, random)
        expected.add(messages.signature(arguments, sequence))
    counts = [100, 300, 5]
    group = [Arguments("all_reduce", F32E, count, "direct", "sum", parse("linear8")) for count in counts]
    buffers = [buffers_of(arguments, random, ranks.size) for arguments in group]
    state.run_group(Result("group"), ranks, comm, group, buffers)
    total = sum(fused.round_up(arguments.count, fused.step(arguments)) for arguments in group)
    expected.add(messages.signature(replace(group[0], count=total), len(CALLS), counts))
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    ranks.call(
        lambda rank: [
            CallArguments("recv", None, y, 64, F32E, peer=1, codec="linear8")
            if rank == 0
            else CallArguments("send", x, None, 64, F32E, peer=0, codec="linear8")
        ]
    )
    send = Arguments("send_recv", F32E, 64, "direct", "sum", parse("linear8"), root=1)
    expected.add(messages.signature(send, 0, receiver=0))
    return expected


def check_frames(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares the frames of calls over TCP."""
    result = Result("frames")
    try:
        capture = Capture()
    except PermissionError:
        result.differ("capture", 1, "it needs root or CAP_NET_RAW")
        return result
    with Ranks(library, 2, 4096, transport=4, interface="lo") as ranks:
        expected = run_calls(ranks, random)
    seen = set()
    for stream in capture.stop():
        for number, frame in enumerate(frames_of(stream)):
            call, payload = frame[:40], struct.unpack("<I", frame[40:44])[0]
            seen.add(call)
            ours = messages.frame(call, payload, number)
            result.compare("frame", 1, np.frombuffer(ours, np.uint8), np.frombuffer(frame, np.uint8))
    words = [struct.unpack("<5Q", call) for call in seen ^ expected]
    result.expect("signatures on one side only", [], words)
    return result
