"""The GPT that is trained, and its loss. It uses attention's interface only."""
