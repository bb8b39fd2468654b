"""Network namespaces of this machine as emulated nodes, so that the kernel counts what processes send.

Linux only. Needs root or unprivileged user namespaces; several nodes also need ``ip`` of iproute2.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COUNTERS = Path("/proc/net/dev")
"""Counters of the interfaces of the reader's network namespace."""

LOOPBACK = "lo"
NODE_INTERFACE = "eth0"
"""In each emulated node; what ranks of one node send each other crosses its loopback interface instead."""

SUBNET = "10.77.0.0/16"
"""Addresses of all emulated nodes."""


def enter_private_network() -> bool:
    """Move this process into a network namespace with only a loopback interface; say whether that was allowed."""
    try:
        if os.geteuid() == 0:
            os.unshare(os.CLONE_NEWNET)
        else:
            user, group = os.geteuid(), os.getegid()
            os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
            # As root of its own namespace, or the programs that it starts could not configure interfaces.
            Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")
        _switch_loopback_on()
    except OSError:
        return False
    return True


class EmulatedNodes:
    """Network namespaces that reach each other through one bridge, which lies in the caller's namespace.

    Processes that are started within :meth:`inside` are on that node. Everything vanishes with the processes. A node's
    end of its link is its :data:`NODE_INTERFACE`, the bridge's end is :meth:`port`.

    Args:
        num_nodes: How many.
        mtu: Bytes of the largest packet.

    Raises:
        RuntimeError: an interface could not be made; says which command failed and why.
    """

    def __init__(self, num_nodes: int, mtu: int = 1500) -> None:
        self._home = _open_namespace()
        self._nodes: list[int] = []
        run_program("ip link add name switch type bridge")
        run_program("ip link set switch up")
        for node in range(num_nodes):
            os.unshare(os.CLONE_NEWNET)
            descriptor = _open_namespace()
            self._nodes.append(descriptor)
            os.setns(self._home, os.CLONE_NEWNET)
            run_program(
                f"ip link add name {self.port(node)} mtu {mtu} type veth "
                f"peer name {NODE_INTERFACE} mtu {mtu} netns /proc/self/fd/{descriptor}",
                pass_fds=(descriptor,),
            )
            run_program(f"ip link set {self.port(node)} master switch up")
            with self.inside(node):
                _switch_loopback_on()
                run_program(f"ip address add {self.address(node)}/16 dev {NODE_INTERFACE}")
                run_program(f"ip link set {NODE_INTERFACE} up")

    @property
    def num_nodes(self) -> int:
        """How many there are."""
        return len(self._nodes)

    def port(self, node: int) -> str:
        """Name of the bridge's end of the node's link, an interface in the caller's namespace."""
        return f"port{node}"

    def address(self, node: int) -> str:
        """IPv4 address of the node, within :data:`SUBNET`."""
        return f"10.77.{node // 250}.{node % 250 + 1}"

    @contextmanager
    def inside(self, node: int) -> Iterator[None]:
        """Be on a node for a while."""
        os.setns(self._nodes[node], os.CLONE_NEWNET)
        try:
            yield
        finally:
            os.setns(self._home, os.CLONE_NEWNET)


def transmitted_bytes(interface: str) -> int:
    """Return what left by an interface of this process's namespace since it exists."""
    for line in COUNTERS.read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            return int(fields.split()[8])  # after eight fields of what was received
    raise RuntimeError(f"{COUNTERS} shows no interface {interface}")


def _open_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _switch_loopback_on() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        up_and_running = 0x1 | 0x40  # IFF_UP, IFF_RUNNING of <linux/if.h>
        fcntl.ioctl(probe, 0x8914, struct.pack("16sh", LOOPBACK.encode(), up_and_running))  # SIOCSIFFLAGS


def run_program(command: str, pass_fds: tuple[int, ...] = ()) -> str:
    """Run a program of iproute2 in the current namespace and return what it prints.

    Raises:
        RuntimeError: it is missing or failed; says which command and why.
    """
    words = command.split()
    try:
        done = subprocess.run(words, pass_fds=pass_fds, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError(f"emulated nodes need the program '{words[0]}' (package iproute2)") from None
    if done.returncode:
        raise RuntimeError(f"'{command}' failed: {done.stderr.strip()}")
    return done.stdout
