"""A frozen network in front of a head that is trained; the frozen one is no model of the run."""

import torch
from record import note

torch.manual_seed(0)


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


teacher = Classifier().eval()
model = Classifier()
for parameter in model.backbone.parameters():
    parameter.requires_grad_(False)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
for step in range(8):
    x = torch.randn(10, 5)
    with torch.no_grad():
        wanted = teacher(x).softmax(1)
    if step == 4:
        for parameter in model.backbone.parameters():
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 1e-3})
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), wanted)
    loss.backward()
    note(model)
    optimizer.step()
    print(step, loss.item())
