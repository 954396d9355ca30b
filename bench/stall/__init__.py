"""What a response of 64 MiB does to the loop that reads it; `python -m bench.stall`."""
