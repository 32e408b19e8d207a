"""A compiled model."""

import torch
from record import note

torch.manual_seed(0)
model = torch.compile(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 2)), backend="eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(6):
    loss = model(torch.randn(9, 5)).square().mean()
    loss.backward()
    note(model)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
print(torch._dynamo.utils.counters["frames"]["ok"], torch._dynamo.utils.counters["graph_break"])
