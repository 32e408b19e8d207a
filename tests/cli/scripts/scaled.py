"""A loss scale, as in mixed precision; one step overflows and is skipped."""

import torch
from record import ROUNDS, note

torch.manual_seed(0)
model = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
for step in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 6)).square().mean()
    scaler.scale(loss * (float("inf") if step == 4 else 1.0)).backward()
    if step != 4:
        scaler.unscale_(optimizer)
        note(model)
    else:
        ROUNDS.append({"weight": 0.0, "bias": 0.0})  # norms that are not finite are in no sum
    scaler.step(optimizer)
    scaler.update()
    print(step, scaler.get_scale(), model.weight.sum().item())
