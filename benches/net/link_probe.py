#!/usr/bin/env python3
"""Measures the bandwidth of TCP connections in both directions at once.

link_probe.py listen ADDRESS PORT SECONDS [CONNECTIONS] | link_probe.py connect ADDRESS PORT SECONDS [CONNECTIONS]
Both ends send and receive for SECONDS, on 1 connection or several, and print the received bits per second of their
direction.
"""

import socket
import sys
import threading
import time


def connected(address, port):
    """Returns a connection to a listener that may not listen yet."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, port), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def measure(connection, seconds, rates):
    """Appends the received bits per second of a connection to `rates`."""
    connection.settimeout(20)
    end = time.monotonic() + seconds

    def send():
        block = bytes(1 << 18)
        while time.monotonic() < end:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    buffer, received, since, counted = bytearray(1 << 18), 0, None, 0
    start = time.monotonic()
    while size := connection.recv_into(buffer):
        received += size
        now = time.monotonic()
        # The first 0.3 s are not measured, because TCP's slow start and the burst of the token bucket distort
        # them.
        if since is None and now - start > 0.3:
            since, counted = now, received
        last = now
    sender.join()
    rates.append((received - counted) * 8 / (last - since))


def main():
    role, address, port, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    count = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    if role == "listen":
        with socket.create_server((address, port)) as server:
            server.settimeout(20)
            connections = [server.accept()[0] for _ in range(count)]
    else:
        connections = [connected(address, port) for _ in range(count)]
    rates = []
    threads = [threading.Thread(target=measure, args=(it, seconds, rates)) for it in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(rates) != count:
        sys.exit("a connection failed")
    print(sum(rates))


if __name__ == "__main__":
    main()
