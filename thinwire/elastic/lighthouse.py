"""Where members meet: torchft's lighthouse, listening where it is told to and nowhere else."""

from __future__ import annotations

from typing import Self

from thinwire.elastic.require import require_torchft


class Lighthouse:
    """Tells members who else is there. One per run, on any host that all of them reach.

        with tw.elastic.Lighthouse() as lighthouse:
            print(lighthouse.address)

    host: the address that it listens on: loopback, or that of a private network. Whoever reaches it can join the run
    and stop it. port: 0 takes a free one. min_members: fewer do not train. join_seconds: how long those who are ready
    wait for others that are alive and not ready yet. lost_seconds: a member that was silent for so long is gone.

    UsageError where torchft is not installed.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, min_members: int = 1, join_seconds: float = 10.0,
        lost_seconds: float = 2.0,
    ) -> None:  # fmt: skip
        require_torchft()
        from torchft.coordination import LighthouseServer

        self.server = LighthouseServer(
            bind=f"{host}:{port}", min_replicas=min_members, join_timeout_ms=round(1000 * join_seconds),
            quorum_tick_ms=50, heartbeat_timeout_ms=round(1000 * lost_seconds),
        )  # fmt: skip
        self.address = f"http://{host}:{self.server.address().rpartition(':')[2]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; members that have met go on until the next step."""
        self.server.shutdown()
