"""Tests of the benches themselves."""
