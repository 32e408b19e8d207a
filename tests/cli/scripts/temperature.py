"""In the manner of SAC: one optimizer owns a tensor that belongs to no module."""

import torch
from record import note

torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
log_alpha = torch.zeros(1, requires_grad=True)
policy_optimizer, alpha_optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2), torch.optim.Adam([log_alpha], lr=1e-2)
for step in range(8):
    policy_optimizer.zero_grad()
    entropy = torch.distributions.Categorical(logits=policy(torch.randn(12, 3))).entropy().mean()
    (-log_alpha.exp().detach() * entropy).backward()
    note(policy)
    policy_optimizer.step()
    alpha_optimizer.zero_grad()
    (log_alpha * (entropy.detach() - 0.5)).sum().backward()
    alpha_optimizer.step()
    print(step, entropy.item(), log_alpha.item())
