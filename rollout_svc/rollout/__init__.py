"""One group under way, from its prompt to the buffer."""
