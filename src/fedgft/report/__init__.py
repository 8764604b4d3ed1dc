"""Figures and sentences made from results."""
