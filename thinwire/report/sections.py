"""The figures of the report in their order on the page, each with its heading and the words under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from thinwire.report import figures, links
from thinwire.report.runs import Run
from thinwire.report.summary import Summary


@dataclass(frozen=True)
class Section:
    """A figure's place on the page.

    `name`: of its file. `title`: the heading. `draw`: makes the figure. `caption`: what to see in it, whatever the runs
    are. `without`: what is said where there is no figure. `several`: added to the caption where there are several runs.
    `middle`: what a thick line is, where one is drawn through a noisy series."""

    name: str
    title: str
    draw: figures.Draw
    caption: str
    without: str
    several: str = ""
    middle: str = ""

    def caption_of(self, figure: Figure, runs: Sequence[Run]) -> str:
        """The words under `figure`, drawn of `runs`: of nothing that it does not show."""
        words = [self.caption, self.several if len(runs) > 1 else ""]
        if self.middle and figures.has_thin_lines(figure):
            words.append(f"Thin: every step; thick: the running {self.middle}.")
        return " ".join(filter(None, words))


SECTIONS = (
    Section(
        "loss-time", "Held-out loss against time", figures.loss_time,
        "Lower and further left is better.",
        "no held-out loss was measured",
        "The dashed line is the worst of the final losses; the rings show when each run is there, on the straight line "
        "between two evaluations.",
    ),
    Section(
        "loss-bytes", "Held-out loss against bytes", figures.loss_bytes,
        "The same losses against what all ranks had sent by then, on a logarithmic axis. Before the first byte there "
        "is nothing to show.",
        "no held-out loss was measured after the first byte was sent",
        "The distance between two curves is the factor between their bytes.",
    ),
    Section(
        "training", "Training loss", figures.training,
        "The loss of each step's own samples.",
        "no training loss was recorded",
        "Curves that lie on each other mean that compression did not change the training.",
        "mean",
    ),
    Section(
        "progress", "Training loss against time and bytes", figures.progress,
        "The same losses against training time, and against what all ranks had sent by then, logarithmic.",
        "no training loss was recorded",
        middle="mean",
    ),
    Section(
        "tokens", "Tokens per second", figures.tokens,
        "Tokens of a step over its seconds; evaluation and checkpoints are left out.",
        "no step was timed",
        middle="median",
    ),
    Section(
        "links", "Each link", links.links,
        "What each rank's link carries during training, as the channels count it. At the right: the part of the step "
        "in which it sends, where the rate of the links is known (dashed). A link that is busy all of the step is "
        "what it waits for.",
        "the run did not record what each rank sends (one rank alone, or an earlier version)",
    ),
    Section(
        "bytes", "Bytes by channel", figures.channels,
        "Left: how much was sent, and by which channel. Right: the shares, which say what is worth compressing next.",
        "no byte was sent between ranks",
    ),
    Section(
        "errors", "Compression error", figures.errors,
        "How far what arrived was from what was meant: ‖meant − arrived‖ / ‖meant‖, logarithmic, one panel per "
        "channel. Gradients may stand at a high error: error feedback sends later what was left out.",
        "no compression error was measured (nothing was compressed, or the run did not record it)",
        "A run that compressed nothing has no error to show.",
        "mean",
    ),
    Section(
        "boundaries", "Compression error by boundary", links.boundaries,
        "The same per boundary between two stages, and for gradients per stage: the mean over replicas. Forward and "
        "backward are means of what was measured since the launch.",
        "no compression error was recorded by rank",
    ),
    Section(
        "hit-rate", "Samples that both ends remember", figures.hit_rate,
        "The share of each step's samples that were sent as a change against their last visit. It is 0 % in the first "
        "pass over the data and should stay near 100 % after it; if it does not, the memory's capacity is too small.",
        "no run keeps activations by sample (delta memory)",
        "A run without such a memory has no curve.",
        "mean",
    ),
    Section(
        "step-time", "Step time", figures.step_time,
        "Above: seconds per step. Below: how many of them a rank waited for the gradient exchange after its own work "
        "was done. A few steps far above all others (the first compiles kernels) may be cut off.",
        "no step was timed",
        middle="median",
    ),
)  # fmt: skip


def draw(runs: Sequence[Run], summary: Summary) -> dict[str, Figure]:
    """Every figure that `runs` have, by name; `summary`: their numbers."""
    drawn = {section.name: section.draw(runs, summary) for section in SECTIONS}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def captions(runs: Sequence[Run], drawn: Mapping[str, Figure]) -> dict[str, str]:
    """The words under each of `drawn`, the figures of `runs`, by name."""
    return {s.name: s.caption_of(drawn[s.name], runs) for s in SECTIONS if s.name in drawn}
