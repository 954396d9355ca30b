"""Tests of the replay buffer."""
