"""From run folders to a page: which runs there are, whether they are the same, what they cost, which is better."""
