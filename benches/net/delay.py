"""Delays the link between two hosts of netns.Net, also on kernels without netem.

Each host gets a TAP device instead of its link. A thread moves frames from one device to the other after
the delay. It carries a few hundred Mbit/s.
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
    """Returns why no delayed link can be created here, or None if one can."""
    return None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "/dev/net/tun cannot be opened"


class Line:
    """The only link between hosts `one` and `other`, with a delay of `seconds` each way. A context manager."""

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
        """Replaces a host's network device by a TAP device with its name and address."""
        space = self.net.spaces[host]
        netns.ip("-n", space, "link", "del", netns.DEVICE)
        tap = in_space(space, open_tap)
        netns.ip("-n", space, "addr", "add", f"{self.net.address(host)}/24", "dev", netns.DEVICE)
        netns.ip("-n", space, "link", "set", netns.DEVICE, "up")
        return tap

    def carry(self):
        """Moves frames between the devices until `stop` is set."""
        waiting = {tap: collections.deque() for tap in self.taps}
        other = dict(zip(self.taps, reversed(self.taps)))
        poll = select.poll()
        for tap in self.taps:
            poll.register(tap, select.POLLIN)
        while not self.stop.is_set():
            due = [queue[0][0] for queue in waiting.values() if queue]
            timeout = min(max(min(due, default=1) - time.monotonic(), 0), 0.05)
            for tap, _ in poll.poll(timeout * 1000 if due else 50):
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
                        pass  # a full device drops frames, as a link does


def open_tap():
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", netns.DEVICE.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def in_space(space, what):
    """Calls `what` in another namespace and returns its result.

    A thread of its own makes the call, because setns moves the calling thread for good.
    """
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
