"""Sparse gradients of an embedding, with an optimizer of their own."""

import torch
from record import note

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(20, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(12, 1))
optimizers = [torch.optim.SparseAdam(model[0].parameters(), lr=1e-2), torch.optim.Adam(model[2].parameters(), lr=1e-2)]
for step in range(6):
    model.zero_grad()
    loss = (model(torch.randint(20, (8, 3))) - 0.5).square().mean()
    loss.backward()
    note(model)
    for optimizer in optimizers:
        optimizer.step()
    print(step, loss.item())
