"""Where members meet: torchft's lighthouse, listening where it is told to and nowhere else."""

from __future__ import annotations

from typing import Self

from thinwire.elastic.fetching import in_url
from thinwire.elastic.require import require_torchft
from thinwire.errors import UsageError


class Lighthouse:
    """Tells members who else is there. One per run, on any host that all of them reach.

        with tw.elastic.Lighthouse() as lighthouse:
            print(lighthouse.address)

    host: the address that it listens on: loopback, or that of a private network. Whoever reaches it can join the run
    and stop it. port: 0 takes a free one. min_members: fewer do not train. join_seconds: how long those who are ready
    wait for others that are alive and not ready yet. lost_seconds: a member that was silent for so long is gone.

    UsageError where torchft is not installed, or it cannot listen there.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, min_members: int = 1, join_seconds: float = 10.0,
        lost_seconds: float = 2.0,
    ) -> None:  # fmt: skip
        require_torchft()
        from torchft.coordination import LighthouseServer

        place = in_url(host.strip("[]"))
        try:
            self.server = LighthouseServer(
                bind=f"{place}:{port}", min_replicas=min_members, join_timeout_ms=round(1000 * join_seconds),
                quorum_tick_ms=50, heartbeat_timeout_ms=round(1000 * lost_seconds),
            )  # fmt: skip
        except RuntimeError as error:
            there = f": join the one that is there (--lighthouse http://{place}:{port})" if port else ""
            raise UsageError(f"no lighthouse can listen at {place}:{port}: {error}{there}") from None
        self.address = f"http://{place}:{self.server.address().rpartition(':')[2]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; members that have met go on until the next step."""
        self.server.shutdown()
