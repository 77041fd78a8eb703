"""The k-th largest magnitude, and the k largest: counted bit by bit (radix.py, shared_table.py), then brought to their
places (largest.py)."""
