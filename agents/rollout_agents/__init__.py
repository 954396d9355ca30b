"""Agent loops that come with rollout_svc."""
