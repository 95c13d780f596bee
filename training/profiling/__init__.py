"""What a step costs: time, utilisation, memory, and where they go."""
