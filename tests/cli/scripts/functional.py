"""No module is ever called: the parameters are used by a function."""

import torch
from record import note

torch.manual_seed(0)


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope, self.intercept = torch.nn.Parameter(torch.randn(2, 3)), torch.nn.Parameter(torch.zeros(2))

    def predict(self, x):
        return torch.nn.functional.linear(x, self.slope, self.intercept)


line = Line()
optimizer = torch.optim.SGD(line.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    loss = (line.predict(torch.randn(8, 3)) - 1).square().mean()
    loss.backward()
    note(line)
    optimizer.step()
    print(step, loss.item())
