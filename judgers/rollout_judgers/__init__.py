"""Judgers that come with rollout_svc."""
