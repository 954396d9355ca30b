"""The rollout stage of an asynchronous LLM-RL loop, as a service."""
