"""Privacy of the sums that leave a site: noise, small cells, the budget, its ledger, the policy.

`noise` adds the noise and accounts for it (`Budget`), `suppression` protects the sums of
`fedgft measure`, `ledger` remembers what a site released, and `policy` decides what a deployed site
may send. `fedgft measure` and the deployed clients share the noise. Nothing here imports Flower;
noise needs the extra ``fedgft[private]`` (OpenDP).
"""
