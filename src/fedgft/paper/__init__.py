"""Reproduction of the FedGFT paper: experiments, published numbers, claims, figures, page."""
