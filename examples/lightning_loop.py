"""FedGFT in PyTorch Lightning: the penalty in `training_step`, its update at the start of an epoch.

You see accuracy and gap (equal opportunity of decisions on held-out rows) without and with the
penalty: the gap falls to the target of 2 points, and the accuracy hardly changes. The model has one
logit. The learning rate falls along a cosine. You need `pip install lightning`.
"""

import lightning
import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

import fedgft

EPOCHS = 20
torch.set_num_threads(1)  # small tensors
data = fedgft.data.synthetic(rows=8000, features=4, gap=0.3)
sex = np.array(["f", "m"])[data.groups]
x, y = torch.tensor(data.features), torch.tensor(data.labels)
train, test = slice(0, 4000), slice(4000, None)


class Fair(lightning.LightningModule):
    def __init__(self, **how):
        super().__init__()
        layers = torch.nn.Linear(x.shape[1], 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        self.net = torch.nn.Sequential(*layers)
        self.penalty = fedgft.Penalty("eop", **how).fit(sex[train])

    def on_train_epoch_start(self):
        with torch.no_grad():
            self.penalty.update(self.penalty.statistics(self.net(x[train]), y[train], sex[train]))

    def training_step(self, batch, _):
        logits, y, a = self.net(batch[0]), *batch[1:]
        return bce(logits[:, 0], y.float()) + self.penalty(logits, y, a)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["penalty"] = self.penalty.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.penalty.load_state_dict(checkpoint["penalty"])


for name, how in (("without", {"lam": 0.0}), ("with", {"target": 0.02})):
    lightning.seed_everything(0, verbose=False)
    model = Fair(**how)
    rows = TensorDataset(x[train], y[train], model.penalty.encode(sex[train]))
    loader = DataLoader(rows, batch_size=256, shuffle=True)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    lightning.Trainer(max_epochs=EPOCHS, enable_model_summary=False, **off).fit(model, loader)
    decisions = (model.net(x[test])[:, 0] > 0).long()
    gap = fedgft.equal_opportunity_difference(y[test], decisions, sensitive_features=sex[test])
    print(f"{name}: accuracy {(decisions == y[test]).double().mean():.3f}, gap {gap:.3f}")
