"""A line with delay between two hosts of netns.Net: for kernels without netem as well.

Each host gets a TAP device instead of its cable; a thread carries frames from one to the other and
lets each wait. Good for a few hundred Mbit/s.
"""

import collections
import ctypes
import fcntl
import os
import select
import struct
import threading
import time

import netns

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000


def missing():
    """Why there can be no such line here; None if there can."""
    return None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "/dev/net/tun cannot be opened"


class Line:
    """The only line between hosts `one` and `other`, `seconds` long each way. A context."""

    def __init__(self, net, one, other, seconds):
        self.net, self.ends, self.seconds = net, (one, other), seconds
        self.stop = threading.Event()

    def __enter__(self):
        self.taps = [self.tap(host) for host in self.ends]
        self.thread = threading.Thread(target=self.carry)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        for tap in self.taps:
            os.close(tap)

    def tap(self, host):
        """A TAP device in a host's place of its cable, under the same name and address."""
        space = self.net.spaces[host]
        netns.ip("-n", space, "link", "del", netns.DEVICE)
        tap = in_space(space, open_tap)
        netns.ip("-n", space, "addr", "add", f"{self.net.address(host)}/24", "dev", netns.DEVICE)
        netns.ip("-n", space, "link", "set", netns.DEVICE, "up")
        return tap

    def carry(self):
        waiting = {tap: collections.deque() for tap in self.taps}
        other = dict(zip(self.taps, reversed(self.taps)))
        poll = select.poll()
        for tap in self.taps:
            poll.register(tap, select.POLLIN)
        while not self.stop.is_set():
            due = [queue[0][0] for queue in waiting.values() if queue]
            patience = min(max(min(due, default=1) - time.monotonic(), 0), 0.05)
            for tap, _ in poll.poll(patience * 1000 if due else 50):
                try:
                    while frame := os.read(tap, 65536):
                        waiting[other[tap]].append((time.monotonic() + self.seconds, frame))
                except BlockingIOError:
                    pass
            now = time.monotonic()
            for tap, queue in waiting.items():
                while queue and queue[0][0] <= now:
                    try:
                        os.write(tap, queue.popleft()[1])
                    except OSError:
                        pass  # a full device drops, as a line does


def open_tap():
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", netns.DEVICE.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def in_space(space, what):
    """What `what` returns in another namespace; on a thread of its own, which alone moves there."""
    result = []

    def move():
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{space}", encoding="utf-8") as there:
            if libc.setns(there.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        result.append(what())

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    return result[0]
