"""The meeting point of several nodes, looked at from one of them before torchrun waits there."""

from __future__ import annotations

import errno
import socket

from megatron_loco.launch.torchrun import Rendezvous


def check_rendezvous(rendezvous: Rendezvous) -> None:
    """Look up the head node, and on the head node itself whether its port is free. One node needs neither.

    Whether anybody listens there is not asked: the head node may start last, and torchrun waits for it.

    Args:
        rendezvous: Where the nodes meet.

    Raises:
        ValueError: MASTER_ADDR is not known, or MASTER_PORT is taken or not allowed.
    """
    if rendezvous.nnodes == 1:
        return
    assert rendezvous.master_addr is not None
    assert rendezvous.master_port is not None
    address, port = rendezvous.master_addr, rendezvous.master_port
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:  # also where the name is not one
        raise ValueError(
            f"MASTER_ADDR: {address!r} does not resolve to an address on this node ({error.strerror or error}); set it "
            "to the name or number of node 0, the same on all nodes"
        ) from None
    except UnicodeError:
        raise ValueError(f"MASTER_ADDR: {address!r} is not the name of a host") from None
    if rendezvous.node_rank == 0:
        problem = port_problem(port)
        if problem:
            raise ValueError(f"MASTER_PORT: {problem}; set it to a free port, the same on all nodes")


def port_problem(port: int) -> str:
    """Say why this machine cannot listen on a port; empty if it can.

    Args:
        port: The port number.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As torch's TCPStore: connections of a run that has just ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is taken on this machine by another process"
            return f"port {port} cannot be used on this machine ({error.strerror})"
    return ""
