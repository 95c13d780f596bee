"""Many runs: a Hydra launcher that gives every job a process, and what became of each."""
