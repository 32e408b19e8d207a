"""The forward and the loss in one compiled function, so that no module is called outside of compiled code."""

import torch
from record import note

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


@torch.compile(backend="eager", fullgraph=True)
def loss_of(x):
    return model(x).square().mean()


for step in range(6):
    loss = loss_of(torch.randn(9, 5))
    loss.backward()
    note(model)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
