"""Many runs: a Hydra launcher that gives every job a process, and reports the outcome of each."""
