"""A fair model between organisations."""
