"""Published scores, one file each: the formula, its tensors, and where it comes from."""
