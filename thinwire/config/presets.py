"""Wire settings by name, as data: the same tables as under `[wire]` in a run.toml.

A name under `codec` or `collective` is a constructor and the other keys are its arguments; `memory` is a constructor
too. `when`: which messages are compressed, always, Optimus-CC's epilogue, or critical (those without slack in the
simulator). `stages`: whose gradients are compressed (stages.py).
`embedding` is the tied one: one exchange over both its stages (fused), or one on each and one between them (separate).
`auto` measures first and compresses at most as the rest says: the preset of that name is "max" with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.errors import UsageError

FOUR_BITS = {"codec": "quantize", "bits": 4, "scale": "full"}  # as AQ-SGD's code rounds
ROTATED_FOUR_BITS = {"codec": "rotated", "inner": {"codec": "quantize", "bits": 4, "scale": "mse"}}
OK_TOPK = {
    "collective": "ok_topk", "density": 0.01, "tau": 64, "tau_prime": 128, "thresholds": "nudged",
    "memory": "error_feedback",
}  # fmt: skip
BF16_MEAN = {"collective": "two_hop", "codec": {"codec": "cast", "to": "bf16"}, "memory": "plain"}  # as torch's hook
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # fp32, as torch sends it
    "off": {},
    "bf16": {
        "forward": {"codec": "cast", "to": "bf16"},
        "backward": {"codec": "cast", "to": "bf16"},
        "gradient": BF16_MEAN,
        "embedding": {**BF16_MEAN, "sync": "fused"},
    },
    # eight bits everywhere: no state per sample, no tuning
    "safe": {
        "forward": {"codec": "quantize", "bits": 8},
        "backward": {"codec": "quantize", "bits": 8},
        "gradient": {"collective": "quantized", "bits": 8, "memory": "error_feedback"},
        "embedding": {"collective": "quantized", "bits": 8, "sync": "fused"},
    },
    # AQ-SGD (arXiv 2206.01299), GPT-2's setting: forward 4 bits against the last visit, backward 8 bits, every code of
    # the grid used. The first epoch is uncompressed in both directions and between replicas, as in the authors' code;
    # the paper's algorithm has full first visits in forward only (warmup = 0). Their data-parallel half is [optim] name
    # = "frozen_adam": its momentum then takes the gradient section, and its freezing ends the warm-up.
    "paper-aqsgd": {
        "forward": {
            "codec": "quantize",
            "bits": 4,
            "scale": "full",
            "memory": {"memory": "delta", "store": "fp32", "gate": False},
        },
        "backward": {"codec": "quantize", "bits": 8, "scale": "full", "warmup": "epoch"},
        "gradient": {
            "collective": "two_hop",
            "codec": FOUR_BITS,
            "memory": "error_feedback",
            "warmup": "epoch",
            "exact_dims": 0,
        },
        "embedding": {
            "collective": "two_hop",
            "codec": FOUR_BITS,
            "memory": "error_feedback",
            "warmup": "epoch",
            "sync": "fused",
        },
    },
    # Ok-Topk (arXiv 2201.07598) as its code has it for BERT: 1 % of the whole gradient, vectors too, in one unit; the
    # thresholds found every 128 steps, and nudged in between. The pipeline is not its subject
    "paper-oktopk": {
        "gradient": {**OK_TOPK, "exact_dims": 0, "unit_mb": 1e6},
        "embedding": {**OK_TOPK, "sync": "fused"},
    },
    # Optimus-CC (arXiv 2301.09830): low rank backward in the epilogue, low rank gradients on the first three quarters
    # of the stages, embeddings excluded; a tensor's rank is min(n, m, rank), so that small matrices lose nothing
    "paper-optimus": {
        "backward": {"codec": "low_rank", "rank": 16, "memory": "error_feedback", "when": "epilogue"},
        "gradient": {
            "collective": "low_rank",
            "rank": 128,
            "memory": "error_feedback",
            "stages": 0.75,
            "exclude": ["*embed*", "lm_head*", "*.wte.*", "*.wpe.*"],
        },
        "embedding": {"sync": "fused"},
    },
    # as few bits as fine-tuning tolerates, by our measurements (docs/quality.md, docs/train.md): three bits each way
    # along the pipeline, four between replicas; sparse gradients cost far more quality at equal bytes
    "max": {
        "forward": {
            "codec": "quantize",
            "bits": 3,
            "memory": {"memory": "delta", "cold": {"codec": "quantize", "bits": 8}},
        },
        "backward": {"codec": "quantize", "bits": 3},
        "gradient": {"collective": "quantized", "bits": 4, "memory": "error_feedback"},
        "embedding": {"collective": "quantized", "bits": 4, "memory": "error_feedback", "sync": "fused"},
    },
    # for samples that come once (pre-training, one epoch): no memory of samples. A random rotation spreads the large
    # values of a block, and scales are those of least error, so that four bits each way do without it
    # (docs/from-scratch.md); between replicas as `max`
    "scratch": {
        "forward": ROTATED_FOUR_BITS,
        "backward": ROTATED_FOUR_BITS,
        "gradient": {"collective": "quantized", "bits": 4, "memory": "error_feedback"},
        "embedding": {"collective": "quantized", "bits": 4, "memory": "error_feedback", "sync": "fused"},
    },
}
# where every rank is given the ids of the tokens: what a hidden state has in common with others of its token is known
# to both ends, and only the rest is sent, in as many bytes
PRESETS["scratch-tokens"] = {**PRESETS["scratch"], "forward": {**ROTATED_FOUR_BITS, "tokens": 0.5}}
# The same for links on which four bits are too many: codes without bias beside means both ways, of gradients by the
# token that comes next, and the sender's gradient passes through the code's scale (memory/scale_gradient.py)
TWO_BITS = {"codec": "transform", "bits": 2}
PRESETS["scratch-two-bits"] = {
    **PRESETS["scratch"],
    "forward": {**TWO_BITS, "tokens": 0.5, "scale_gradient": True},
    "backward": {**TWO_BITS, "tokens": 0.1},
}
# Every tile of 64 × 64 sends its 64 largest values, two bits each, with error feedback
TILES = {"codec": "tile_topk", "k": 64, "tile": 64}
LOCAL_PRESETS: dict[str, dict[str, Any]] = {
    # DiLoCo (arXiv 2311.08105): exact means, Nesterov outside
    "diloco": {"wire": "off", "every": 100, "outer_lr": 0.7, "momentum": 0.9},
    # Streaming DiLoCo (arXiv 2501.18512): fragments at their own offsets, four bits without a mantissa, one step of
    # delay, and half of the local weights kept
    "streaming-diloco": {
        "wire": {
            "gradient": {
                "collective": "gather", "codec": {"codec": "power_of_two", "bits": 4}, "memory": "plain",
                "exact_dims": 0,
            }
        },
        "every": 100, "fragments": 4, "delay": 1, "mix": 0.5, "outer_lr": 0.7, "momentum": 0.9,
    },
    # SparseLoCo (arXiv 2508.15706): error feedback takes the place of the outer momentum
    "sparseloco": {
        "wire": {
            "gradient": {
                "collective": "gather", "codec": {**TILES, "values": {"codec": "bin_means"}},
                "memory": {"memory": "error_feedback", "decay": 0.95}, "exact_dims": 0,
            }
        },
        "every": 30, "outer_lr": 1.0, "momentum": 0.0, "nesterov": False,
    },
    # ours: the same share of every tile, with two magnitudes that fit its values best and coded indices. Half of what
    # was not sent stays in the site's weights. No momentum outside, and a large rate: sites pick different entries, of
    # which a mean has a share only. Sending is hidden behind a step; what was learnt meanwhile is carried over whole
    "local-max": {
        "wire": {
            "gradient": {
                "collective": "gather", "codec": {**TILES, "values": {"codec": "two_levels", "block": 512}},
                "memory": {"memory": "error_feedback", "decay": 0.95}, "exact_dims": 0,
            }
        },
        "every": 30, "delay": 1, "keep": 0.5, "outer_lr": 3.0, "momentum": 0.0, "nesterov": False,
    },
    # ours, for models that know much already: every value's sign and a magnitude per block, to its owner and back, so
    # that a site's bytes do not grow with their number; what was not sent stays in the site's weights
    "local-signs": {
        "wire": {
            "gradient": {
                "collective": "two_hop", "codec": {"codec": "scaled_sign", "block": 512},
                "memory": {"memory": "error_feedback", "decay": 1.0}, "exact_dims": 0,
            }
        },
        "every": 34, "keep": 1.0, "outer_lr": 1.0, "momentum": 0.0, "nesterov": False,
    },
}  # fmt: skip
KEYS = ("preset", "forward", "backward", "gradient", "embedding", "auto", "streams")


def written_out(table: Mapping[str, Any]) -> dict[str, Any]:
    """A `[wire]` table with its `preset` replaced by the preset's sections, which the table's own sections override.

    A table with `auto` alone is the preset of that name. UsageError where a key or the preset is unknown.
    """
    rest = dict(table)
    for key in rest:
        if key not in KEYS:
            raise UsageError(f"[wire] {key}: no such key; allowed are {', '.join(KEYS)}")
    name = rest.pop("preset", "auto" if rest.get("auto") is True and len(rest) == 1 else "off")
    if name == "auto":
        return {"auto": True, **PRESETS["max"], **rest}
    if not isinstance(name, str) or name not in PRESETS:
        raise UsageError(f"[wire] preset = {name!r}: allowed are auto, {', '.join(PRESETS)}")
    return {**PRESETS[name], **rest}
