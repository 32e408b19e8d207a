"""The plainest loop: a classifier, its gradients clipped."""

import torch
from record import note

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
inputs, targets = torch.randn(64, 6), torch.randint(3, (64,))
for epoch in range(3):
    for batch, wanted in zip(inputs.split(16), targets.split(16), strict=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), wanted)
        loss.backward()
        note(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    print(epoch, loss.item())
print(sum(p.double().sum().item() for p in model.parameters()))
