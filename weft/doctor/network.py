"""The interfaces of this host, and which of them gloo and NCCL would talk through: a wrong one is the usual hang."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.doctor.findings import Finding

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
REMEDY = "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on every host to the interface that reaches the others"


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    up: bool

    @property
    def loopback(self) -> bool:
        return any(ipaddress.ip_address(address).is_loopback for address in self.addresses)


def interfaces() -> list[Interface]:
    """The network interfaces with their addresses; IPv6 ones only where Linux lists them."""
    found = []
    for _, name in socket.if_nameindex():
        try:
            up = Path(f"/sys/class/net/{name}/operstate").read_text().strip() != "down"
        except OSError:
            up = True
        found.append(Interface(name, (*_ipv4(name), *_ipv6(name)), up))
    return found


def _ipv4(name: str) -> list[str]:
    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return [socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])]
    except OSError:  # it has none, or this is not Linux
        return []


def _ipv6(name: str) -> list[str]:
    try:
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return []
    return [str(ipaddress.IPv6Address(bytes.fromhex(fields[0]))) for fields in lines if fields[-1] == name]


def hostname_addresses(hostname: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(hostname, None)))
    except OSError:
        return []


def check_network(hosts: int = 1, environment: dict[str, str] | None = None) -> list[Finding]:
    """Interfaces, name resolution, and the choice of gloo and NCCL; stricter where there are several hosts."""
    environment = dict(os.environ) if environment is None else environment
    found, hostname = interfaces(), socket.gethostname()
    shown = [
        f"{one.name} {' '.join(one.addresses) or 'without an address'}{'' if one.up else ' (down)'}" for one in found
    ]
    findings = [Finding("OK" if found else "warn", "interfaces", "; ".join(shown) or "none")]
    chosen = environment.get("GLOO_SOCKET_IFNAME")
    findings.append(
        _gloo_from_hostname(hostname, hostname_addresses(hostname), found, hosts)
        if not chosen
        else _named("gloo", chosen.split(","), found, hosts, "GLOO_SOCKET_IFNAME")
    )
    findings.append(_nccl(environment.get("NCCL_SOCKET_IFNAME", ""), found, hosts))
    return findings


def _named(who: str, names: Sequence[str], found: Sequence[Interface], hosts: int, variable: str) -> Finding:
    known = {one.name: one for one in found}
    for name in names:
        if name not in known or not known[name].addresses:
            what = "has no address" if name in known else "does not exist here"
            return Finding(
                "FAIL", who, f"{variable}={','.join(names)}, and {name} {what}", f"one of {', '.join(known)}"
            )
        if known[name].loopback and hosts > 1:
            return Finding("FAIL", who, f"{variable}={name} is the loopback: it reaches no other host", REMEDY)
    return Finding("OK", who, f"uses {', '.join(names)} ({variable})")


def _gloo_from_hostname(hostname: str, addresses: Sequence[str], found: Sequence[Interface], hosts: int) -> Finding:
    """Without a variable gloo takes the interface that the host's own name resolves to, else the loopback."""
    owner = {address: one for one in found for address in one.addresses}
    usable = [address for address in addresses if address in owner or ipaddress.ip_address(address).is_loopback]
    if not addresses:
        text = f"the host's name {hostname} does not resolve, so gloo would use the loopback"
    elif not usable:
        text = f"the host's name {hostname} resolves to {', '.join(addresses)}, which no interface here has"
    elif ipaddress.ip_address(usable[0]).is_loopback:
        text = f"the host's name {hostname} resolves to {usable[0]}, the loopback"
    else:
        return Finding("OK", "gloo", f"uses {owner[usable[0]].name}: {hostname} resolves to {usable[0]}")
    if hosts > 1:
        return Finding("FAIL", "gloo", f"{text}: other hosts cannot be reached", REMEDY)
    return Finding("OK", "gloo", f"{text}: fine on one host, not on several")


def _nccl(variable: str, found: Sequence[Interface], hosts: int) -> Finding:
    """NCCL takes InfiniBand, then all but docker and the loopback; the variable holds prefixes (= exact, ^ not)."""
    addressed = [one for one in found if one.addresses and one.up]

    def matches(one: Interface, pattern: str) -> bool:
        return one.name == pattern[1:] if pattern.startswith("=") else one.name.startswith(pattern)

    if variable:
        excluding = variable.startswith("^")
        patterns = variable.removeprefix("^").split(",")
        taken = [one for one in addressed if any(matches(one, pattern) for pattern in patterns) != excluding]
        if not taken:
            known = ", ".join(one.name for one in addressed)
            return Finding("FAIL", "nccl", f"NCCL_SOCKET_IFNAME={variable} leaves no interface", f"one of {known}")
        how = f"NCCL_SOCKET_IFNAME={variable}"
    else:
        ranked = sorted(addressed, key=lambda one: (one.loopback, one.name.startswith("docker"), one.name[:2] != "ib"))
        taken, how = ranked[:1], "its own choice"
    if hosts > 1 and all(one.loopback for one in taken):
        return Finding("FAIL", "nccl", "only the loopback is left: it reaches no other host", REMEDY)
    return Finding("OK", "nccl", f"would use {', '.join(one.name for one in taken) or 'nothing'} ({how})")
