"""Builds a topology out of network namespaces, switches and cables, and changes its links while it runs.

All switches live in one namespace, the core; each host in its own, where it sees `lo` and `eth0`. What a
host sends is shaped where it leaves the host, so that its sockets fill up as they would on a slow network card;
what it receives is shaped where it leaves the switch.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.lab.delay import Delay, start_relay
from thinwire.lab.namespaces import enter, new_network
from thinwire.lab.netlink import Netlink, Traffic, index_of
from thinwire.lab.shaping import bundle_packets, shape
from thinwire.lab.tcp import apply
from thinwire.lab.topology import MTU, Host, HostLink, Topology

DEVICE = "eth0"  # every host's only way out
_CORE = "core"


@dataclass
class _Cable:
    """One link in place: the device below (in a host, or a site's switch) and the device above."""

    below: Netlink
    below_index: int
    above: str
    above_index: int
    link: HostLink
    plug: str  # the device in the upper switch: the one above, unless a user-space delay stands between
    extended: str | None = None  # the far side of that delay


class Wiring:
    """A network that has been made. The process that makes one is in the core's namespace afterwards.

    netem: make latency and loss by the kernel's netem, else by a process of our own.
    patience: seconds for which TCP in the hosts retries before it reports a dead link.
    """

    def __init__(self, topology: Topology, netem: bool, patience: float) -> None:
        self.topology = topology
        self._netem = netem
        self._patience = patience
        self.host_namespaces: list[int] = []
        self.notes: list[str] = []  # what could not be done as asked, for the user to read
        self._cables: dict[str, _Cable] = {}
        self._core_namespace = _new_network()
        self._core = Netlink()
        self._build()
        self._fill_switch_tables()

    def _build(self) -> None:
        several = len(self.topology.sites) > 1
        if several:
            self._switch(_CORE)
        for number, (site, link) in enumerate(self.topology.sites.items()):
            self._switch(f"site{number}")
            if several:
                self._uplink(number, site, link)
        numbers = {site: number for number, site in enumerate(self.topology.sites)}
        for number, host in enumerate(self.topology.hosts):
            self._host(number, host, f"site{numbers[host.site]}")

    def _fill_switch_tables(self) -> None:
        """Enter at every switch behind which port every host is. Hosts have each other's addresses from the start."""
        several = len(self.topology.sites) > 1
        for host in self.topology.hosts:
            self._core.add_station(index_of(self._cables[host.name].plug), host.mac)
            for number, site in enumerate(self.topology.sites if several else ()):
                port = self._cables[site].plug if site == host.site else f"down{number}"
                self._core.add_station(index_of(port), host.mac)

    def _switch(self, name: str) -> None:
        self._core.add_bridge(name)
        self._core.set_up(index_of(name))

    def _uplink(self, number: int, site: str, link: HostLink) -> None:
        above, below = f"up{number}", f"down{number}"
        self._core.add_cable(above, below, self.topology.mtu)
        cable = _Cable(self._core, index_of(below), above, index_of(above), link, plug=above)
        self._core.attach(index_of(below), index_of(f"site{number}"))
        self._connect(site, cable, _CORE)

    def _host(self, number: int, host: Host, switch: str) -> None:
        namespace = _new_network()
        inside = Netlink()
        inside.set_up(index_of("lo"))
        for note in apply(self.topology.tcp, self._patience):
            self._note(note)
        enter(self._core_namespace)
        above = f"host{number}"
        self._core.add_cable(above, DEVICE, self.topology.mtu, namespace, host.mac)
        enter(namespace)
        device = index_of(DEVICE)
        inside.add_address(device, host.address, self.topology.prefix)
        enter(self._core_namespace)
        self.host_namespaces.append(namespace)
        cable = _Cable(inside, device, above, index_of(above), host.link, plug=above)
        self._connect(host.name, cable, switch)
        inside.add_neighbours(device, ((h.address, h.mac) for h in self.topology.hosts if h is not host))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _connect(self, name: str, cable: _Cable, switch: str) -> None:
        """Attach a cable's upper end to a switch, through a user-space delay where netem is missing, and shape it."""
        self._cables[name] = cable
        if cable.link.delayed and not self._netem:
            cable.extended, cable.plug = f"late{len(self._cables)}", f"plug{len(self._cables)}"
            self._core.add_cable(cable.extended, cable.plug, self.topology.mtu)
        for device in {cable.above, cable.extended or cable.above, cable.plug}:
            self._core.set_up(index_of(device))
        self._core.attach(index_of(cable.plug), index_of(switch))
        self._shape(cable)
        cable.below.set_up(cable.below_index)

    def _shape(self, cable: _Cable) -> None:
        link = cable.link
        late, mtu = self._netem and link.delayed, self.topology.mtu
        cable.below.set_bundle(cable.below_index, 1 if self.topology.by_packet else bundle_packets(link.up, mtu))
        shape(cable.below, cable.below_index, link.up, link.latency, link.loss, netem=late, mtu=mtu)
        shape(self._core, cable.above_index, link.down, mtu=mtu)

    def start_delays(self) -> int | None:
        """Start the process that delays packets in user space, if any link needs it; its process id."""
        late = [c for c in self._cables.values() if c.extended is not None]
        if not late:
            return None
        return start_relay([Delay(c.above, str(c.extended), c.link.latency, c.link.loss, c.link.reorder) for c in late])

    def set_rate(self, name: str, up: float | None, down: float | None) -> None:
        """Change a link's rates; what waits in its queue is lost, and TCP sends it again."""
        cable = self._cables[name]
        cable.link = replace(cable.link, up=up, down=down)
        self._shape(cable)

    def set_connected(self, name: str, connected: bool) -> None:
        """Cut a link at the switch, or restore it. As in a wide-area network the host keeps its carrier: it notices
        the break only because no answer comes."""
        self._core.set_forwarding(index_of(self._cables[name].plug), connected)

    def given_up(self) -> dict[str, int]:
        """Per host, how many connections TCP has given up because no answer came."""
        result = {}
        for host, namespace in zip(self.topology.hosts, self.host_namespaces):
            enter(namespace)
            lines = [line.split() for line in Path("/proc/net/netstat").read_text().splitlines()]
            names, values = (line for line in lines if line[0] == "TcpExt:")
            result[host.name] = int(values[names.index("TCPAbortOnTimeout")])
        enter(self._core_namespace)
        return result

    def counters(self) -> dict[str, Traffic]:
        """Per link, as its host (or site) counts it: what the switch received from a host is what the host sent."""
        devices = self._core.counters()
        return {name: devices[cable.above].from_other_end() for name, cable in self._cables.items()}


def _new_network() -> int:
    """A network namespace with IPv4 alone: IPv6 sends messages of its own, which would be counted as traffic."""
    namespace = new_network()
    with suppress(OSError):  # a kernel without IPv6, or a container that protects its settings
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    return namespace


def netem_exists() -> bool:
    """Whether this kernel can delay packets itself; tried on a device in a namespace of its own."""
    namespace = new_network()
    probe = Netlink()
    try:
        probe.add_cable("probe", "peer", MTU)
        shape(probe, index_of("probe"), None, latency=0.001, netem=True)
    except FileNotFoundError:  # the kernel's answer to an unknown discipline
        return False
    finally:
        probe.close()
        os.close(namespace)
    return True
