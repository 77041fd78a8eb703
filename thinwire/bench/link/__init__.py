"""`thinwire bench link`: links of the lab against their rate, and long links by flows and congestion control."""
