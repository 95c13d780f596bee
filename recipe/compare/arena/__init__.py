"""The arena: is one arm better than another, by how much, and how sure is that?"""
