"""Where each checkpoint tensor lies in a running model, and which layers keep more than that."""
