"""Publishing from many ranks, each of which holds a part of the model; none ever gathers it."""
