"""The cost of a step: time, utilisation and memory."""
