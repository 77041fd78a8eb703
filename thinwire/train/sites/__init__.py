"""Several sites in a run: their averages, and what they tell each other."""
