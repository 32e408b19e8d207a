"""An optimizer that evaluates a closure several times in a step."""

import torch
from record import ROUNDS, note

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4)
x, y = torch.randn(32, 3), torch.randn(32, 1)


def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


for step in range(5):
    loss = optimizer.step(closure)
    note(model)
    print(step, loss.item())
print(len(ROUNDS))
