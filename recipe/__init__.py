"""Everything that turns attention/, model/ and data/ into runs and answers."""
