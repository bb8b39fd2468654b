"""Links of a chosen rate between emulated nodes, and a raw TCP stream that shows whether they hold it.

Both directions of each node's link are limited by a token bucket (``tbf``): at the node what it sends, at the bridge
what it receives, or several senders would meet at one receiver unlimited. Settings under which a stream was measured to
reach 0.99 of the rate: large packets, a bucket of some 64-KiB frames (a smaller one makes the kernel cut them in
software), a queue of 20 ms, and ``cubic`` (``bbr``, the default of some machines, loses up to half of the rate while
the processors are busy).
"""

from __future__ import annotations

import socket
import threading
import time

from megatron_loco.bench.namespaces import NODE_INTERFACE, SUBNET, EmulatedNodes, run_program

MTU = 9000
CONGESTION_CONTROL = "cubic"
QUEUE = "20ms"
TOLERANCE = 0.05
"""How far a raw stream may be from the rate; headers alone are 0.7 % of it."""

_SLOW_START_S = 0.2
_STREAM_S = 0.4
_BUFFER_BYTES = 2**20


class LimitedLinks:
    """Emulated nodes whose links have a rate. The caller must be in a private network (``enter_private_network``).

    Args:
        num_nodes: How many.

    Raises:
        RuntimeError: an interface or a route could not be made; says which command failed and why.
    """

    def __init__(self, num_nodes: int) -> None:
        self.nodes = EmulatedNodes(num_nodes, mtu=MTU)
        for node in range(num_nodes):
            with self.nodes.inside(node):
                # By route: the namespace's own default may only be set to what the machine allows to everybody.
                run_program(f"ip route change {SUBNET} dev {NODE_INTERFACE} congctl {CONGESTION_CONTROL}")

    def limit(self, gbit: float | None) -> None:
        """Set the rate of all links, in both directions.

        Args:
            gbit: Gbit/s; ``None``: no limit, and so no lost packets, which would be sent and counted twice.

        Raises:
            RuntimeError: the program ``tc`` or the kernel's token bucket filter is missing.
        """
        limit = "noqueue" if gbit is None else _token_bucket(gbit)
        for node in range(self.nodes.num_nodes):
            run_program(f"tc qdisc replace dev {self.nodes.port(node)} root {limit}")
            with self.nodes.inside(node):
                run_program(f"tc qdisc replace dev {NODE_INTERFACE} root {limit}")

    def stream_shares(self, gbit: float, num_nodes: int) -> list[float]:
        """Let each node send a raw TCP stream to the next, all at once, and return the shares of the rate they reach.

        Args:
            gbit: The rate, Gbit/s.
            num_nodes: Only the first that many.

        Raises:
            RuntimeError: a connection does not use :data:`CONGESTION_CONTROL`.
        """
        rates = [0.0] * num_nodes
        threads = []
        for node in range(num_nodes):
            sender, receiver = self._connect(node, (node + 1) % num_nodes)
            threads.append(threading.Thread(target=_send, args=(sender,), daemon=True))
            threads.append(threading.Thread(target=_receive, args=(receiver, rates, node), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [rate / gbit for rate in rates]

    def _connect(self, source: int, target: int) -> tuple[socket.socket, socket.socket]:
        # A socket stays in the namespace in which it was made.
        with self.nodes.inside(target), socket.create_server((self.nodes.address(target), 0)) as server:
            with self.nodes.inside(source):
                sender = socket.create_connection(server.getsockname())
            receiver, _ = server.accept()
        for end in (sender, receiver):
            used = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
            if used != CONGESTION_CONTROL:
                raise RuntimeError(f"connections use congestion control {used}, not {CONGESTION_CONTROL}")
        return sender, receiver


def burst_bytes(gbit: float) -> int:
    """Size of the token bucket for a rate in Gbit/s; so much passes at once after a pause.

    Small, since it favours small transfers; large enough that a busy machine, which refills it late, keeps the rate.
    """
    return round(max(2**17, min(2**18, 2**18 * gbit), 2**16 * gbit))


def _token_bucket(gbit: float) -> str:
    return f"tbf rate {gbit * 1e9:.0f}bit burst {burst_bytes(gbit)} latency {QUEUE}"


def is_off(shares: list[float]) -> bool:
    """Whether a stream missed the rate by more than :data:`TOLERANCE`."""
    return any(abs(share - 1) > TOLERANCE for share in shares)


def _send(sender: socket.socket) -> None:
    data = bytes(_BUFFER_BYTES)
    end = time.monotonic() + _SLOW_START_S + _STREAM_S
    with sender:
        while time.monotonic() < end:
            sender.send(data)


def _receive(receiver: socket.socket, rates: list[float], index: int) -> None:
    buffer = bytearray(_BUFFER_BYTES)
    begin = time.monotonic()
    total, now = 0, begin
    first: tuple[int, float] | None = None
    with receiver:
        while count := receiver.recv_into(buffer):
            total, now = total + count, time.monotonic()
            if first is None and now - begin > _SLOW_START_S:
                first = total, now
    if first is not None and now > first[1]:
        rates[index] = (total - first[0]) * 8 / (now - first[1]) / 1e9
