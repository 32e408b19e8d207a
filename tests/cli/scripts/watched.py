"""A script that starts an exporter itself, before its first step or after some; the port that it gets is the run's."""

import sys

import torch
from record import note

from torch_grad_exporter import start_exporter

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
at = int(sys.argv[1])
exporter = None
for step in range(8):
    if step == at:
        exporter = start_exporter(model, int(sys.argv[2]), addr="127.0.0.1", every=1)
        print(exporter.port == int(sys.argv[2]))
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    if step >= at:
        note(model)
    optimizer.step()
