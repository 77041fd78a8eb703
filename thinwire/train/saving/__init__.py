"""What a run leaves on disk: the state of a rank in a checkpoint, and the trained model."""
