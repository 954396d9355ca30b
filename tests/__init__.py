"""The promises, held."""
