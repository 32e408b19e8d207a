"""A LightningModule, whose own forward is never run, trained by Lightning's `Trainer`."""

import logging
import warnings

import lightning
import torch
from record import note

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Encoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh())
        self.decoder = torch.nn.Linear(4, 6)

    def training_step(self, batch, _index):
        return (self.decoder(self.encoder(batch)) - batch).square().mean()

    def validation_step(self, batch, _index):
        print("val", (self.decoder(self.encoder(batch)) - batch).square().mean().item())

    def on_before_optimizer_step(self, optimizer):
        note(self)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


lightning.seed_everything(0, verbose=False)
numbers = torch.randn(32, 6)
model = Encoder()
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)
trainer.fit(model, torch.utils.data.DataLoader(numbers, 8), torch.utils.data.DataLoader(numbers, 16))
print(model.decoder.weight.sum().item())
