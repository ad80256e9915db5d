"""What changed since the last step, taken from the live tensors, and made a delta."""
