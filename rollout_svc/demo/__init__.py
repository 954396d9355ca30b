"""The whole loop on one machine: a small GRPO trainer against the real service."""
