"""How often the arena's verdict is right: sweeps of an arm against itself, with a known effect, and real ones."""
