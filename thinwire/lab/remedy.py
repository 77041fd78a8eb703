"""Why a machine refuses a network, and what would help."""

from __future__ import annotations

import errno
from pathlib import Path

_SWITCHES = (
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
    ("/proc/sys/user/max_net_namespaces", "0", "sysctl -w user.max_net_namespaces=10000"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


def explain(what: str, number: int, text: str) -> str:
    """Why a step of making a network failed, and the remedy, in one line.

    what: the request that failed. number: its errno. text: the error's own text.
    """
    return f"the lab cannot make {_thing(what)}: {text}; {_remedy(number)}"


def _thing(request: str) -> str:
    return "its network" if request == "build" else request


def _remedy(number: int) -> str:
    if number in (errno.EOPNOTSUPP, errno.ENOENT, errno.ENODEV):
        return "this kernel lacks a part; as root: modprobe -a veth bridge sch_tbf"
    for path, bad, command in _SWITCHES:
        try:
            if Path(path).read_text().strip() == bad:
                return f"as root: {command}"
        except OSError:
            continue
    return (
        "a container usually forbids it: start it with --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined (Docker, Podman), or run outside the container"
    )
