"""A fair model between organizations."""
