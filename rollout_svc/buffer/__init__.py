"""The replay buffer: what is finished, what is leased, and what waits to go on."""
