"""What to start next, and the loop that starts it."""
