"""A model with a schedule and an exponential average of its weights, looked at without training before."""

import torch
from record import note
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(48, 4)
)
print(model(torch.randn(2, 1, 6, 6)).shape)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=7)
for _ in range(7):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(torch.randn(5, 1, 6, 6)), torch.randint(4, (5,)))
    loss.backward()
    note(model)
    optimizer.step()
    schedule.step()
    average.update_parameters(model)
    print(loss.item(), schedule.get_last_lr())
average.eval()
print(average(torch.randn(2, 1, 6, 6)).sum().item())
