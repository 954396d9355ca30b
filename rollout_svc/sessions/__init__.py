"""Conversations of agents that nobody wrote for us: they speak OpenAI's or Anthropic's API, we own the token ids."""
