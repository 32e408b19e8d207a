"""An agent that is an object of its own: rollouts without gradients, several epochs over each, two optimizers."""

import torch
from record import note


class Agent:
    def __init__(self):
        self.actor = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.critic = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-2)

    def rollout(self):
        states = torch.randn(32, 3)
        with torch.no_grad():
            chosen = torch.distributions.Categorical(logits=self.actor(states))
            actions = chosen.sample()
            return states, actions, chosen.log_prob(actions), states.sum(1), self.critic(states).squeeze(1)

    def update(self, states, actions, before, returns, values):
        advantages = returns - values
        for epoch in range(2):
            for part in torch.arange(32).split(16):
                now = torch.distributions.Categorical(logits=self.actor(states[part])).log_prob(actions[part])
                ratio = (now - before[part]).exp()
                gain = torch.min(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
                self.actor_optimizer.zero_grad()
                (-gain.mean()).backward()
                note(self.actor, "actor")
                torch.nn.utils.clip_grad_norm_(self.actor.parameters(), 0.5)
                self.actor_optimizer.step()
                error = (self.critic(states[part]).squeeze(1) - returns[part]).square().mean()
                self.critic_optimizer.zero_grad()
                error.backward()
                note(self.critic, "critic")
                self.critic_optimizer.step()
            print(epoch, error.item())


torch.manual_seed(0)
agent = Agent()
for _ in range(3):
    agent.update(*agent.rollout())
