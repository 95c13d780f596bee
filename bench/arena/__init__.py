"""How often the arena is right: sweeps of an arm against itself, a planted effect, and sweeps that were run."""
