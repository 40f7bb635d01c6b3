"""The payload rate of a one-way TCP stream: `stream.py receive` on one host, `stream.py send ADDRESS SECONDS` on another.

The receiver prints bytes per second, from the first byte to the last.
"""

import socket
import sys
import time

PORT = 5555

if sys.argv[1] == "receive":
    with socket.create_server(("", PORT)) as server:
        stream, _ = server.accept()
        received, start = len(stream.recv(1 << 20)), time.monotonic()
        first = received
        while piece := stream.recv(1 << 20):
            received += len(piece)
        print((received - first) / (time.monotonic() - start))
else:
    with socket.create_connection((sys.argv[2], PORT)) as stream:
        end = time.monotonic() + float(sys.argv[3])
        while time.monotonic() < end:
            stream.sendall(bytes(1 << 18))
