"""Train a language model over a slow network: model stages, data, configuration, loop, checkpoints."""
