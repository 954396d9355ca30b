"""The trainer's side of each way that weights are handed over."""
