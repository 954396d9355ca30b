"""The loop for a long time, with real processes: nothing grows, and every heavy tensor has an owner. `make soak`."""
