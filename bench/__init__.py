"""Benches: ours beside the floor, interleaved in one run, medians."""
