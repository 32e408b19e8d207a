"""The gradients do not come from a backward: they are taken by `torch.autograd.grad` and attached to the parameters."""

import torch
from record import note

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(7):
    loss = model(torch.randn(6, 4)).square().mean()
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        parameter.grad = gradient
    note(model)
    optimizer.step()
    print(step, loss.item())
