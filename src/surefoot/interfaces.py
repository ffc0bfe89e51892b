"""By which network interface the other machines are reached; gloo takes that of the machine's own name, which is often 127.0.0.1."""

from __future__ import annotations

import socket
import struct
import sys

_ANYWHERE = "192.0.2.1"  # an address for documentation (RFC 5737): nobody has it, and nothing is sent there
_ADDRESS_OF = 0x8915  # SIOCGIFADDR in linux/sockios.h


def towards(host: str) -> str | None:
    """The name of the interface by which `host` is reached; of the default route where that is this machine.

    None where neither can be told: then gloo chooses. Sends nothing. Linux and IPv4 only.

    >>> towards("no such machine.invalid") in (None, towards("192.0.2.1"))
    True
    """
    if sys.platform != "linux":
        return None
    names = _names()
    for there in (host, _ANYWHERE):
        name = names.get(_own_address(there))
        if name not in (None, "lo"):
            return name
    return None


def _own_address(host: str) -> str | None:
    """This machine's address as `host` would see it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((host, 9))  # of UDP: looks up the route, and sends nothing
        except OSError:
            return None
        return str(asked.getsockname()[0])


def _names() -> dict[str | None, str]:
    """The names of the interfaces that have an address, by it."""
    import fcntl  # not on Windows

    found: dict[str | None, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    return found
