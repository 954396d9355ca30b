"""A real service under load, killed again and again: nothing is lost, nothing comes twice."""
