"""FedGFT with the Trainer of Hugging Face: the penalty in `compute_loss`, its update per epoch.

You see accuracy and gap (equal opportunity of decisions on held-out rows) without and with the
penalty: the gap falls to the target of 2 points. The learning rate falls along a cosine. Any model
with logits works. You need `pip install transformers accelerate`; where they are missing, the tests
run this file with a small stand-in of `Trainer`.
"""

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import fedgft

torch.set_num_threads(1)  # small tensors
data = fedgft.data.synthetic(rows=8000, features=4, gap=0.3)
sex = np.array(["f", "m"])[data.groups]
train, test = np.arange(4000), np.arange(4000, 8000)


class FairTrainer(Trainer):
    def __init__(self, *args, penalty, **more):
        super().__init__(*args, **more)
        self.penalty = penalty
        self.add_callback(Update(penalty))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, y, a = model(inputs["x"]), inputs["labels"], inputs["group"]
        loss = cross_entropy(logits, y) + self.penalty(logits, y, a)
        return (loss, {"logits": logits}) if return_outputs else loss


class Update(TrainerCallback):
    def __init__(self, penalty):
        self.penalty = penalty

    @torch.no_grad()
    def on_epoch_begin(self, args, state, control, *, model, train_dataloader, **more):
        statistics = self.penalty.statistics
        batches = train_dataloader
        self.penalty.update(statistics(model(b["x"]), b["labels"], b["group"]) for b in batches)


x, y = torch.tensor(data.features), torch.tensor(data.labels)
quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
rate = {"learning_rate": 0.02, "lr_scheduler_type": "cosine", "num_train_epochs": 20}
options = {"per_device_train_batch_size": 256, "remove_unused_columns": False, "logging_steps": 1e6}
for name, how in (("without", {"lam": 0.0}), ("with", {"target": 0.02})):
    set_seed(0)
    layers = torch.nn.Linear(x.shape[1], 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
    net = torch.nn.Sequential(*layers)
    penalty = fedgft.Penalty("eop", **how).fit(sex[train])
    a = penalty.encode(sex)
    rows = [{"x": x[i], "labels": y[i], "group": a[i]} for i in train]
    arguments = TrainingArguments("unused", **quiet, **rate, **options)
    FairTrainer(net, arguments, train_dataset=rows, penalty=penalty).train()
    decisions = net(x[test]).argmax(1)
    gap = fedgft.equal_opportunity_difference(y[test], decisions, sensitive_features=sex[test])
    print(f"{name}: accuracy {(decisions == y[test]).double().mean():.3f}, gap {gap:.3f}")
