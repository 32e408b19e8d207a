"""A loop of Accelerate's own, as its launcher starts it."""

import os

import torch
from accelerate import Accelerator
from record import note

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.randn(32, 6), 4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    loss = (model(batch) - 1).square().mean()
    accelerator.backward(loss)
    note(model)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
os.write(1, f"{accelerator.process_index} of {accelerator.num_processes}\n".encode())
accelerator.end_training()
