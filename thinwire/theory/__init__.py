"""The theory bench: the codecs and memories of training on problems whose solution is known."""
