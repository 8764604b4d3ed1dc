"""The reproduction of the paper, behind the command `fedgft reproduce`.

Wang, Payani, Lee & Kompella, "Mitigating Group Bias in Federated Learning: Beyond Local Fairness".

| file                 | what it holds                                                             |
|----------------------|---------------------------------------------------------------------------|
| `cells`              | the paper's experiments as data, and the numbers that it published        |
| `runner`             | trains the cells that are not in the cache                                |
| `convergence`        | Theorem 5.2 and Corollary 5.3, measured                                   |
| `claims`             | what the paper says, compared with our results: sentences with a verdict  |
| `tables_and_figures` | tables and figures of finished records                                    |
| `section`            | all of this per experiment, written to a folder and shown on one page     |

Nothing outside this package and its command knows about the paper.
"""
