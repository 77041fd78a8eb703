"""A run of `thinwire train` with a pipeline, trained inside one process: the same bits, no network, no other rank."""
