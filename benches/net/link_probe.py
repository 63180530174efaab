#!/usr/bin/env python3
"""Measures the bandwidth of a TCP connection in both directions at once.

link_probe.py listen ADDRESS PORT SECONDS | link_probe.py connect ADDRESS PORT SECONDS
Both ends send and receive for SECONDS and print the received bits per second of their direction.
"""

import socket
import sys
import threading
import time


def main():
    role, address, port, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    if role == "listen":
        with socket.create_server((address, port)) as server:
            server.settimeout(20)
            connection, _ = server.accept()
    else:
        deadline = time.monotonic() + 20
        while True:
            try:
                connection = socket.create_connection((address, port), timeout=5)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
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
    print((received - counted) * 8 / (last - since))


if __name__ == "__main__":
    main()
