"""thinwire: compress everything that crosses the slow network in distributed PyTorch training."""

__version__ = "0.1.0"
