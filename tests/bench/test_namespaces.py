"""What the kernel counts between emulated nodes is what was sent between them, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NUM_BYTES = 1_000_000

# In a process of its own: it leaves its network namespace for good.
SCRIPT = f"""
import json, socket
from megatron_loco.bench.namespaces import LOOPBACK, NODE_INTERFACE, EmulatedNodes, enter_private_network
from megatron_loco.bench.namespaces import transmitted_bytes

def send(sender_node):
    with nodes.inside(sender_node):
        sender = socket.create_connection(server.getsockname())
    receiver, _ = server.accept()
    left = {NUM_BYTES}
    while left:
        left -= sender.send(bytes(min(left, 10_000)))
        receiver.recv(10_000)

def counters():
    result = []
    for node in range(2):
        with nodes.inside(node):
            result += [transmitted_bytes(NODE_INTERFACE), transmitted_bytes(LOOPBACK)]
    return result

try:
    if not enter_private_network():
        raise RuntimeError("network namespaces are not allowed")
    nodes = EmulatedNodes(2)
except RuntimeError as error:
    print(json.dumps(str(error)))
else:
    with nodes.inside(0):
        server = socket.create_server(("10.77.0.1", 0))
    readings = [counters()]
    for sender_node in (1, 0):
        send(sender_node)
        readings.append(counters())
    print(json.dumps(readings))
"""


def test_only_what_leaves_a_node_is_counted_there() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    readings = json.loads(done.stdout)
    if isinstance(readings, str):
        pytest.skip(readings)
    before, between, inside = readings
    sent_0, loopback_0, sent_1, loopback_1 = (b - a for a, b in zip(before, between, strict=True))
    # From node 1 to node 0. Headers: at least 52 bytes of TCP and IP and 14 of Ethernet for each packet of 1448; the
    # other direction carries acknowledgements, at most one for each packet; address resolution and so on is small.
    assert NUM_BYTES < sent_1 < 1.06 * NUM_BYTES
    assert sent_0 < 0.06 * NUM_BYTES
    assert (loopback_0, loopback_1) == (0, 0)
    sent_0, loopback_0, sent_1, loopback_1 = (b - a for a, b in zip(between, inside, strict=True))
    # Inside node 0, although to the address of its interface.
    assert loopback_0 > NUM_BYTES
    assert sent_0 + sent_1 < 0.01 * NUM_BYTES
    assert loopback_1 == 0
