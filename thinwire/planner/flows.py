"""What one TCP flow carries over a long link, and how many flows fill it: arithmetic without a network.

One flow of a congestion control that takes loss for congestion carries at most 1.22·MSS/(RTT·√loss) (Mathis et al.
1997); CUBIC, where that is more, 1.054·MSS/RTT·(RTT/loss)^¾ (RFC 9438). BBR does not take random loss for congestion.
Whatever the congestion control, one flow carries at most its window per round trip.
"""

from __future__ import annotations

import math

MSS = 1448  # bytes of payload in a packet of 1500, with TCP's time stamps
INITIAL = 10 * MSS  # bytes that a connection sends before the first answer, at first and after a silence
# Bytes that one flow has under way at most where nothing was set. Linux's usual limit of a sender (the last number of
# tcp_wmem) is 4 MiB, and some of it is the kernel's own: measured were 2.6 MB at 1 Gb/s and 100 ms.
WINDOW = 2_600_000
SILENCE = 1.0  # seconds between the messages of two steps, about
TIMEOUT = 0.2  # seconds that Linux waits for an answer, at least, beyond the round trip
MOST = 32  # flows that are chosen at most: each is a connection between every two ranks
GOAL = 0.9  # share of the rate that the chosen flows are to carry
LOSS_BLIND = ("bbr",)


def one_flow(rtt: float, loss: float, congestion: str, window: float = WINDOW) -> float:
    """Bits per second that one flow carries at most; infinity where nothing but the link limits it.

    rtt: seconds there and back. loss: the share of packets lost at random. congestion: the name of the sender's
    congestion control. window: bytes that it may have under way.
    """
    if rtt <= 0:
        return math.inf
    by_window = 8 * window / rtt
    return min(by_window, 8 * under_way(rtt, loss, congestion) / rtt)


def under_way(rtt: float, loss: float, congestion: str) -> float:
    """Bytes that one flow has under way on average in the long run; infinity where nothing is lost, or loss is no sign
    of congestion to it. The arguments: as of `one_flow`."""
    if loss <= 0 or congestion in LOSS_BLIND:
        return math.inf
    packets = 1.22 / math.sqrt(loss)
    if congestion == "cubic":
        packets = max(packets, 1.054 * (rtt / loss) ** 0.75)
    return MSS * packets


def choose_streams(rate: float, rtt: float, loss: float, congestion: str, window: float = WINDOW) -> int:
    """How many flows a message is best cut over: as few as carry GOAL of the link, MOST at most.

    rate: of the link, in bits per second. The others: as of `one_flow`.
    """
    alone = one_flow(rtt, loss, congestion, window)
    return max(1, min(MOST, math.ceil(GOAL * rate / alone)))


def slow_start(
    nbytes: float, rate: float, rtt: float, streams: int = 1, silence: float = SILENCE, burst: float | None = None,
    usual: float = math.inf,
) -> float:  # fmt: skip
    """Seconds by which the first messages after a silence take longer than at the link's rate.

    A connection sends a window of bytes, waits for the answer, sends twice as many, and so on, until the link is full.
    Linux lets it grow to twice what is under way. In a silence it falls to a half in every time-out (rtt + 200 ms)
    after the first, to INITIAL at least. Where packets are lost, it doubles up to three quarters of what is usually
    under way (ssthresh), and grows by a packet per round trip from there on.
    nbytes: of the messages together. streams: connections that they are cut over. silence: in seconds. burst: bytes
    that were sent before the silence; None: as many. usual: what one flow has under way on average (`under_way`). The
    others: as of `choose_streams`.
    """
    full = rate * rtt / 8
    threshold = 0.75 * usual * streams
    grown = min(2 * min(nbytes if burst is None else burst, full), threshold)
    halved = min(64, max(0, math.ceil(silence / (rtt + TIMEOUT)) - 1))
    window = max(INITIAL * streams, grown / 2**halved)
    left, extra = nbytes, 0.0
    while left > window and window < full:
        extra += rtt - 8 * window / rate
        left -= window
        window = min(2 * window, threshold) if window < threshold else window + MSS * streams
    return extra
