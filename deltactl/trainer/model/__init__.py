"""What is published of a model: its tensors under a checkpoint's names, and when a step is done."""
