"""The second network of two, and its optimizer, come when the first has trained for a while."""

import torch
from record import note

torch.manual_seed(0)
encoder = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = encoder(torch.randn(6, 4)).square().mean()
    loss.backward()
    optimizer.step()
    print("alone", loss.item())
head = torch.nn.Linear(3, 2)
head_optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    head_optimizer.zero_grad()
    loss = (head(encoder(torch.randn(6, 4))) - 1).square().mean()
    loss.backward()
    if step:
        note(encoder, "encoder")
        note(head, "head", within_round=True)
    optimizer.step()
    head_optimizer.step()
    print("both", loss.item())
