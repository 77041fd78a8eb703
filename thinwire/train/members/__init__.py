"""`thinwire train --elastic`: replicas that come and go."""
