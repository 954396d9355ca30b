"""The simulator: whole histories of the real service, in virtual time, by seed."""
