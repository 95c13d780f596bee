"""Whether an attention computes what the reference computes, asked in the middle of a run."""
