"""Privacy of the sums that leave a site: noise, suppression of small cells, budget and policy.

`noise` adds noise and accounts for its cost (`Budget`), `suppression` protects the sums of
`fedgft measure`, `ledger` records what a site released, and `policy` decides what a deployed site
may send. `fedgft measure` and the deployed clients use the same code for noise. This package does
not import Flower. Noise requires the extra ``fedgft[private]`` (OpenDP).
"""
