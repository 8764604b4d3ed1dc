"""The paper's tables and figures as data.

Wang, Payani, Lee & Kompella, "Mitigating Group Bias in Federated Learning: Beyond Local
Fairness". What its text and its numbers differ in is told in docs/paper-vs-code.md.
"""

from fedgft.experiments.convergence import Descent
from fedgft.experiments.spec import Experiment, variants

ALPHAS = (0.5, 5.0, 100.0)
FOUR = ("fedavg", "lrw", "fairfed", "fedgft")  # the paper's four
ONE_ALPHA = "The paper does not say with which alpha this was made; here it is 5."
DATA = ("adult", "compas")

TABLE1 = Experiment(
    name="table1",
    title="Table 1: accuracy and bias of every method",
    claim="FedGFT has the smallest bias in almost all situations, and its accuracy is within "
    "two standard errors of the best method's.",
    variants=variants(alpha=ALPHAS, method=("fedavg", "lrw", "lft", "fairfed", "fedgft")),
    accuracy_of=("sp",),
    note="The accuracy beside the published one is that of the SP runs. LFT, a penalty on each "
    "client's own gap, is in the authors' code and not in their table.",
    left_out=(("celeba", "lft"),),
)

PENALTY = Experiment(
    name="penalty",
    title="The penalty: l1, J(x) = x, against l2, J(x) = x²",
    claim="No significant difference in fairness or accuracy, but training with l2 is much more "
    "stable.",
    variants=tuple(
        (("alpha", alpha), *kind)
        for alpha in ALPHAS
        for kind in (
            *variants(penalty=("l1",), lam=(1.0, 20.0)),
            *variants(penalty=("l2",), lam=(20.0,)),
        )
    ),
    note="Published for COMPAS. The λ of its l1 rows is not stated: the paper's default of 20 "
    "costs far more accuracy than published, and λ = 1 fits, so both are here.",
)

PURE = Experiment(
    name="pure",
    title="Pure clients: each holds one group only",
    claim="FedGFT still lowers the bias where no client has a gap of its own, at a worse trade-off "
    "with accuracy.",
    variants=(
        *variants(method=("fedavg",), partition=("dirichlet",), alpha=(100.0,)),
        *variants(method=("fedgft",), partition=("dirichlet",), penalty=("l1",), lam=(1.0,),
                  alpha=(100.0,)),
        *variants(method=("fedavg",), partition=("pure",), alpha=(100.0,)),
        *variants(method=("fedgft",), partition=("pure",), lam=(10.0, 20.0, 100.0),
                  alpha=(100.0,)),
    ),
    accuracy_of=("sp",),
    note="Published for COMPAS, without FedAvg on pure clients. Alpha is not stated: labels are "
    "dealt with alpha 100. The mixed row of FedGFT is the l1 row of the penalty's table; the pure "
    "rows fit J = x²/2, as in Table 1, and not l1.",
)  # fmt: skip

TRAJECTORY = Experiment(
    name="trajectory",
    title="Figure 1: accuracy and bias over the rounds",
    claim="Without mitigation the bias grows with the accuracy; FairFed and LRW lower it "
    "significantly less than FedGFT does.",
    variants=variants(alpha=ALPHAS, method=FOUR),
    note="The paper does not say which alpha its figure shows; here are all three.",
)

EPOCHS = Experiment(
    name="epochs",
    title="Ablation: local epochs E",
    claim="FedGFT is not sensitive to E.",
    variants=variants(epochs=(1, 2, 5), lam=(20.0,)),
    note=ONE_ALPHA,
)

LAMBDA = Experiment(
    name="lambda",
    title="Ablation: penalty strength λ",
    claim="A higher penalty enforces a smaller bias, while the accuracy decreases slightly.",
    variants=variants(lam=(1.0, 10.0, 20.0, 50.0)),
    note=ONE_ALPHA,
)

LR = Experiment(
    name="lr",
    title="Ablation: learning rate η",
    claim="A wide range of η works well.",
    variants=variants(lr=(0.002, 0.005, 0.01, 0.02, 0.05), lam=(20.0,)),
    note=ONE_ALPHA,
)

CLIENTS = Experiment(
    name="clients",
    title="Ablation: number of clients K",
    claim="The number of clients has little influence on accuracy and fairness.",
    variants=variants(clients=(5, 10, 20), lam=(20.0,)),
    note=ONE_ALPHA,
)

FAIRFED = Experiment(
    name="fairfed",
    title="FairFed at alpha 0.5: three rules, three β",
    claim="On Adult at alpha 0.5 FairFed's accuracy is 67.9 ± 19.1%, and on COMPAS its EOP gap is "
    "9.0 ± 7.6.",
    variants=variants(method=("fairfed",), alpha=(0.5,), rule=("authors", "subtract", "exp"),
                      beta=(0.1, 1.0, 10.0)),
    accuracy_of=("sp",),
    note="These two numbers of Table 1 are farthest from ours. authors: the code behind the "
    "paper's tables. subtract: FairFed as published. exp: the "
    "formula in the paper's text.",
)  # fmt: skip

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e for e in (TABLE1, PENALTY, PURE, TRAJECTORY, EPOCHS, LAMBDA, LR, CLIENTS, FAIRFED)
}

CONVERGENCE = (Descent(lam=1.0, rate=0.5), Descent(lam=20.0, rate=0.03))
NAMES = ("table1", "penalty", "pure", "simpson", "trajectory", "epochs", "lambda", "lr", "clients",
         "fairfed", "convergence")  # fmt: skip
