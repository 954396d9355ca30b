"""How each kind of engine takes weights that are handed to it: one engine's side of one update, by each way."""
