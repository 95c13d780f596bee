"""The GPT that is trained, and its loss. Knows attention's interface only."""
