"""Emulated hosts: one network namespace each, joined by a switch, every link limited to its speed in both directions.

The switch is a bridge in a namespace of its own, so that nothing of a lab shows among the machine's own interfaces and
two labs may use the same addresses.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from weft.lab.errors import LabError

INTERFACE = "eth0"
MOST_HOSTS = 254  # in the network 10.77.0.0/24
NAMESPACES = Path("/run/netns")


def run(*command: str) -> str:
    """Run a system command; its own words are the error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Network:
    """The namespaces and links of one lab, named after it."""

    def __init__(self, name: str, gbit: list[float]) -> None:
        self.gbit = gbit
        self.switch = f"{name}-switch"
        self.hosts = [f"{name}-host{index}" for index in range(len(gbit))]

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def names(self) -> str:
        """The hosts as lines of /etc/hosts."""
        hosts = [
            f"{prefix}{self.address(index)} host{index}"
            for index in range(len(self.hosts))
            for prefix in ("", "::ffff:")
        ]
        return "\n".join(["127.0.0.1 localhost", *hosts, ""])

    def create(self) -> None:
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "switch", "up")
        for index, (host, gbit) in enumerate(zip(self.hosts, self.gbit, strict=True)):
            port = f"port{index}"
            run("ip", "netns", "add", host)
            run("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host)
            run("ip", "-n", self.switch, "link", "set", port, "master", "switch", "up")
            run("ip", "-n", host, "addr", "add", f"{self.address(index)}/24", "dev", INTERFACE)
            run("ip", "-n", host, "link", "set", "lo", "up")
            run("ip", "-n", host, "link", "set", INTERFACE, "up")
            _limit(host, INTERFACE, gbit)  # what the host sends
            _limit(self.switch, port, gbit)  # what it receives

    def received(self, host: int) -> int:
        """Bytes that the limiter has let through to a host: packets as they would be on a wire, headers included."""
        return self._passed(self.switch, f"port{host}")

    def sent(self, host: int) -> int:
        return self._passed(self.hosts[host], INTERFACE)

    @staticmethod
    def _passed(namespace: str, interface: str) -> int:
        found = json.loads(run("tc", "-n", namespace, "-j", "-s", "qdisc", "show", "dev", interface))
        return int(next(queue["bytes"] for queue in found if queue["kind"] == "tbf"))


def _limit(namespace: str, interface: str, gbit: float) -> None:
    # The bucket holds the packets of some milliseconds: with less the limiter falls short of its rate.
    rate, burst = f"{round(gbit * 1000)}mbit", f"{max(512, round(512 * gbit))}kb"
    limit = ["tbf", "rate", rate, "burst", burst, "latency", "100ms"]
    run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *limit)


def delete(name: str) -> None:
    """Remove a lab's namespaces; they take their links with them."""
    for path in NAMESPACES.glob(f"{name}-*"):
        run("ip", "netns", "delete", path.name)
