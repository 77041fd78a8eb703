"""Who is connected to whom, and how fast: hosts on a switch, or sites with a slow link between them.

Every host is connected to its site's switch by a link of its own. With more than one site each switch is connected
to a core by an uplink, which all traffic of that site to the others shares:

    host ─link─ site switch ─uplink─ core ─uplink─ site switch ─link─ host

A latency is the one-way delay of a packet on its way up: from host to host it is the latency of the sender's link,
plus that of the sending site's uplink if the packet crosses it.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.config.toml import read_toml
from thinwire.errors import UsageError
from thinwire.lab.tcp import DEFAULT, Tcp
from thinwire.quantities import parse_bytes, parse_loss, parse_rate, parse_time

SUBNET = "10.77.0.0/24"
LONGEST_LATENCY = 10.0
MTU = 1500  # Ethernet's
MTUS = (576, 9216)  # what is allowed: 9000 is a jumbo frame


@dataclass(frozen=True)
class HostLink:
    """One cable: `up` leaves the host (or site), `down` comes in; bit/s, None is unlimited."""

    up: float | None = None
    down: float | None = None
    latency: float = 0.0  # seconds, one way, on the way up
    loss: float = 0.0  # probability per packet, on the way up
    reorder: float = 0.0  # probability that a packet comes late, behind its followers, on the way up

    @property
    def delayed(self) -> bool:
        """Whether it does anything to packets beside limiting their rate."""
        return bool(self.latency or self.loss or self.reorder)


@dataclass(frozen=True)
class Host:
    """One host of the network: its name, IPv4 address, the name of its site, and its link to the site's switch."""

    name: str
    address: str
    site: str
    link: HostLink

    @property
    def mac(self) -> bytes:
        """Its Ethernet address, derived from its IPv4 address (02: locally administered)."""
        return b"\x02\x00" + ipaddress.IPv4Address(self.address).packed


@dataclass(frozen=True)
class Topology:
    """Hosts in rank order; `sites` gives each site's uplink (a single site has none)."""

    hosts: tuple[Host, ...]
    sites: dict[str, HostLink]
    prefix: int
    mtu: int = MTU  # bytes of a packet at most, IP header included
    tcp: Tcp = DEFAULT  # settings of TCP in the hosts

    def __post_init__(self) -> None:
        low, high = MTUS
        if isinstance(self.mtu, bool) or not isinstance(self.mtu, int) or not low <= self.mtu <= high:
            raise UsageError(f"mtu {self.mtu!r}: allowed is a whole number from {low} to {high}")

    @property
    def links(self) -> dict[str, HostLink]:
        """Every link by the name of what it connects: hosts, and sites where there are several."""
        return {h.name: h.link for h in self.hosts} | (self.sites if len(self.sites) > 1 else {})

    def faster_than(self, rate: float) -> bool:
        """Whether a link with latency or loss may carry more than `rate` bit/s."""
        late = [link for link in self.links.values() if link.delayed]
        return any(way is None or way > rate for link in late for way in (link.up, link.down))

    @property
    def by_packet(self) -> bool:
        """Whether something happens to single packets, so that TCP must not hand over bundles of them."""
        return self.reordered or any(link.loss for link in self.links.values())

    @property
    def reordered(self) -> bool:
        """Whether packets may come late, behind their followers."""
        return any(link.reorder for link in self.links.values())

    @property
    def delayed(self) -> bool:
        """Whether packets are delayed, lost or come late on any link."""
        return any(link.delayed for link in self.links.values())


def flat(hosts: int, link: HostLink, subnet: str = SUBNET, mtu: int = MTU, tcp: Tcp = DEFAULT) -> Topology:
    """`hosts` hosts with equal links on one switch; `mtu` in bytes; `tcp`: settings of the hosts."""
    if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1:
        raise UsageError(f"hosts {hosts!r}: allowed is a whole number from 1")
    placed = [(f"host{i}", "lab", link) for i in range(hosts)]
    return _number(placed, {"lab": HostLink()}, subnet, mtu, tcp)


def in_sites(sites: int, hosts: int, uplink: HostLink, subnet: str = SUBNET) -> Topology:
    """`sites` sites of `hosts` hosts each, site0 and so on; hosts' links are unlimited, every site has this uplink."""
    names = [f"site{i}" for i in range(sites)]
    placed = [(f"{name}-{i}", name, HostLink()) for name in names for i in range(hosts)]
    return _number(placed, dict.fromkeys(names, uplink), subnet, MTU, DEFAULT)


def load(path: str | Path, subnet: str = SUBNET) -> Topology:
    """Read a topology file; the format is in docs/lab.md."""
    document = read_toml(path, "topology ")
    try:
        return _from_table(document, subnet)
    except UsageError as error:
        raise UsageError(f"topology {path}: {error}") from None


def make_link(table: dict[str, Any], where: str, default: HostLink | None = None) -> HostLink:
    """A link from `rate` (both ways) or `up` and `down`, `latency`, `loss` and `reorder`, over a default; `where` is
    what error messages put before the key."""
    default = default or HostLink()
    return HostLink(
        up=_rate(table, "up", where, default.up),
        down=_rate(table, "down", where, default.down),
        latency=_latency(table["latency"], where) if "latency" in table else default.latency,
        loss=parse_loss(table["loss"], f"{where}loss") if "loss" in table else default.loss,
        reorder=parse_loss(table["reorder"], f"{where}reorder") if "reorder" in table else default.reorder,
    )


LINK_KEYS = {"rate", "up", "down", "latency", "loss", "reorder"}
TCP_KEYS = {"congestion", "window", "slow_start_after_idle"}


def make_tcp(table: dict[str, Any]) -> Tcp:
    """The settings of TCP among the keys of `table`, those of TCP_KEYS; others are left alone."""
    given = {key: table[key] for key in TCP_KEYS & set(table)}
    if "window" in given:
        given["window"] = parse_bytes(given["window"], "window")
    return Tcp(**given)


def _rate(table: dict[str, Any], direction: str, where: str, default: float | None) -> float | None:
    key = direction if direction in table else "rate"
    return parse_rate(table[key], f"{where}{key}") if key in table else default


def _latency(value: Any, where: str) -> float:
    seconds = parse_time(value, f"{where}latency")
    if seconds > LONGEST_LATENCY:
        raise UsageError(f"{where}latency {value!r}: allowed is up to {LONGEST_LATENCY:g}s")
    return seconds


def _from_table(table: dict[str, Any], subnet: str) -> Topology:
    _known(table, {"sites", "hosts", "mtu"} | TCP_KEYS, "the file")
    sites = table.get("sites", {})
    if not isinstance(sites, dict) or not sites:
        raise UsageError("no [sites.NAME] table")
    inside, uplinks = {}, {}
    for name, site in sites.items():
        _known(site, LINK_KEYS | {"uplink"}, f"site {name}")
        inside[name] = make_link(site, f"site {name} ")
        uplinks[name] = _uplink(site, name)
    entries = table.get("hosts", [])
    if not isinstance(entries, list) or not entries:
        raise UsageError("no [[hosts]] entry")
    placed: list[tuple[str, str, HostLink]] = []
    for entry in entries:
        placed += _hosts(entry, inside, placed)
    return _number(placed, uplinks, subnet, table.get("mtu", MTU), make_tcp(table))


def _uplink(site: dict[str, Any], name: str) -> HostLink:
    uplink = site.get("uplink", {})
    if isinstance(uplink, str):
        uplink = {"rate": uplink}
    _known(uplink, LINK_KEYS, f"site {name} uplink")
    return make_link(uplink, f"site {name} uplink ")


def _hosts(
    entry: Any, inside: dict[str, HostLink], placed: list[tuple[str, str, HostLink]]
) -> list[tuple[str, str, HostLink]]:
    """The hosts of one [[hosts]] entry: `count` of them, numbered within their site, or one by name."""
    _known(entry, LINK_KEYS | {"site", "count", "name"}, "a [[hosts]] entry")
    site = entry.get("site", next(iter(inside)) if len(inside) == 1 else None)
    if site not in inside:
        raise UsageError(f"a host names site {site!r}; the sites are {', '.join(inside)}")
    count, name = entry.get("count", 1), entry.get("name")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or (name is not None and count != 1):
        raise UsageError(f"count {count!r} of hosts at {site}: allowed is a whole number from 1, and 1 with a name")
    first = sum(1 for _, where, _ in placed if where == site)
    names = [name] if name is not None else [f"{site}-{first + i}" for i in range(count)]
    return [(n, site, make_link(entry, f"host {n} ", inside[site])) for n in names]


def _number(
    placed: list[tuple[str, str, HostLink]], uplinks: dict[str, HostLink], subnet: str, mtu: int, tcp: Tcp
) -> Topology:
    """Hand out addresses, in order."""
    try:
        network = ipaddress.IPv4Network(subnet)
    except ValueError as error:
        raise UsageError(f"subnet {subnet!r}: {error}") from None
    room = network.num_addresses - 2
    if len(placed) > room:
        raise UsageError(f"{len(placed)} hosts: the network {network} has {max(room, 0)} addresses")
    names = [name for name, _, _ in placed] + (list(uplinks) if len(uplinks) > 1 else [])
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,30}", name):
            raise UsageError(f"name {name!r}: allowed are letters, digits and '-', up to 31 of them")
        if names.count(name) > 1:
            raise UsageError(f"the name {name!r} is used twice")
    addresses = network.hosts()
    hosts = tuple(Host(name, str(next(addresses)), site, link) for name, site, link in placed)
    return Topology(hosts, uplinks, network.prefixlen, mtu, tcp)


def _known(table: Any, allowed: set[str], where: str) -> None:
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table")
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise UsageError(f"{where} has the unknown key {unknown[0]!r}; allowed are {', '.join(sorted(allowed))}")
