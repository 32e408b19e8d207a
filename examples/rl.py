"""Reinforcement learning in a minute: GRPO or PPO on a small task, as it should be or with a fault that a rule finds.

python examples/rl.py --save good.json.gz && torch-grad-exporter check good.json.gz
python examples/rl.py --fault entropy --save bad.json.gz; torch-grad-exporter check bad.json.gz
python examples/rl.py --method ppo --fault clipping --save bad.json.gz; torch-grad-exporter check bad.json.gz

The task: write eight digits between 0 and 15 whose sum is the number that the prompt asks for.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_grad_exporter import Exporter, start_exporter

TOKENS, LENGTH, WIDTH = 16, 8, 64
PROMPTS = torch.arange(30, 94, 4)
"""The sums that are asked for."""

FAULTS = {
    "entropy": "a reward that one token satisfies, and no KL term: EntropyCollapse",
    "kl": "no KL term and a learning rate that is too high: KlOutOfRange",
    "reward": "a reward function that fails and returns 0: ZeroAdvantage",
    "hacking": "a reward that also counts a token which the task does not want: RewardWithoutEval",
    "clipping": "too many passes over a batch with too high a learning rate: PolicyClipped",
    "mismatch": "responses sampled at a temperature that the trainer does not know: TrainInferenceMismatch",
}


@dataclass
class Recipe:
    """How to train. `kl`: coefficient of the divergence from the reference. `passes`: over a batch. `temperature`: of sampling."""

    rate: float = 1e-3
    kl: float = 0.1
    passes: int = 2
    clip: float = 0.2
    temperature: float = 1.0


RECIPES = {
    None: Recipe(),
    "entropy": Recipe(rate=5e-3, kl=0.0),
    "kl": Recipe(rate=1e-2, kl=0.0),
    "reward": Recipe(),
    "hacking": Recipe(rate=3e-4, kl=0.0),
    "clipping": Recipe(rate=2e-2, passes=8),
    "mismatch": Recipe(temperature=0.4),
}


class Policy(nn.Module):
    """Writes one token after the other, and estimates the reward: the critic of PPO."""

    def __init__(self, critic: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS + len(PROMPTS), WIDTH)  # a prompt is a token behind those of responses
        self.body = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.value = nn.Linear(WIDTH, 1) if critic else None

    def forward(self, prompts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor | None]:
        """Turn (batch,) and (batch, LENGTH) into logits (batch, LENGTH, TOKENS), and a critic's values (batch, LENGTH)."""
        before = torch.cat([TOKENS + prompts[:, None], responses[:, :-1]], dim=1)
        states, _ = self.body(self.token(before))
        return self.head(states), None if self.value is None else self.value(states).squeeze(-1)

    @torch.no_grad()
    def sample(self, prompts: Tensor, temperature: float = 1.0) -> Tensor:
        """Write a response to each prompt: (batch, LENGTH)."""
        tokens, inputs, state = [], self.token(TOKENS + prompts[:, None]), None
        for _ in range(LENGTH):
            output, state = self.body(inputs, state)
            tokens.append(torch.multinomial((self.head(output[:, -1]) / temperature).softmax(-1), 1))
            inputs = self.token(tokens[-1])
        return torch.cat(tokens, dim=1)


def score(prompts: Tensor, responses: Tensor) -> Tensor:
    """Return what the task wants: 1 where the sum is right, less the further it is off."""
    return 1 - (responses.sum(1) - PROMPTS[prompts]).abs() / 40


def rewards(prompts: Tensor, responses: Tensor, fault: str | None) -> Tensor:
    """Return what is trained on: the score, unless the fault is in the reward."""
    if fault == "reward":
        return torch.zeros(len(prompts))
    if fault == "entropy":
        return (responses == 3).float().mean(1)
    flaw = 4 * (responses == 15).float().mean(1) if fault == "hacking" else 0.0
    return score(prompts, responses) + flaw


def chosen(logits: Tensor, responses: Tensor) -> Tensor:
    """Return the log probabilities of the tokens that were written: (batch, LENGTH)."""
    return logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)


@dataclass
class Batch:
    """What is trained on. `prompts` and `reward`: (batch,). `reference`: log probabilities of all tokens, (batch, LENGTH, TOKENS).

    `responses`, their log probabilities `old` and the `advantage` of each token: (batch, LENGTH), or (batch, 1) for the last.
    """

    prompts: Tensor
    responses: Tensor
    reward: Tensor
    advantage: Tensor
    old: Tensor
    reference: Tensor


class Trainer:
    """A step: sample, reward, and some passes over the batch."""

    def __init__(self, method: str, fault: str | None) -> None:
        self.method, self.fault, self.recipe = method, fault, RECIPES[fault]
        self.policy = Policy(critic=method == "ppo")
        self.reference = copy.deepcopy(self.policy)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.recipe.rate)

    def step(self, groups: int = 16, size: int = 8) -> dict[str, Tensor]:
        """Train on `groups` prompts with `size` responses each. Returns the loss and what TRL would log."""
        prompts = torch.randint(len(PROMPTS), (groups,)).repeat_interleave(size)
        responses = self.policy.sample(prompts, self.recipe.temperature)
        reward = rewards(prompts, responses, self.fault)
        with torch.no_grad():
            logits, values = self.policy(prompts, responses)
            old, sampled = chosen(logits, responses), chosen(logits / self.recipe.temperature, responses)
            reference = self.reference(prompts, responses)[0].log_softmax(-1)
        by_group = reward.view(groups, size)
        if values is None:
            advantage = ((by_group - by_group.mean(1, keepdim=True)) / (by_group.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        else:
            advantage = reward[:, None] - values
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-4)
        batch = Batch(prompts, responses, reward, advantage, old, reference)
        for _ in range(self.recipe.passes):
            logged = self._pass(batch)
        own = {
            "frac_reward_zero_std": (by_group.std(1) == 0).float().mean(),
            "reward": reward.mean(), "reward_std": reward.std(), "completions/mean_length": torch.tensor(float(LENGTH)),
        } if self.method == "grpo" else {"objective/scores": reward.mean()}  # fmt: skip
        return {**logged, **own, "rl/train_inference_kl_divergence": (sampled - old).mean()}

    def _pass(self, batch: Batch) -> dict[str, Tensor]:
        logits, values = self.policy(batch.prompts, batch.responses)
        new = chosen(logits, batch.responses)
        ratio = (new - batch.old).exp()
        free, clipped = ratio * batch.advantage, ratio.clamp(1 - self.recipe.clip, 1 + self.recipe.clip) * batch.advantage
        log_probs = logits.log_softmax(-1)
        kl = (log_probs.exp() * (log_probs - batch.reference)).sum(-1)  # exact, as there are few tokens
        loss = -torch.minimum(free, clipped).mean() + self.recipe.kl * kl.mean()
        if values is not None:
            loss = loss + 0.5 * (values - batch.reward[:, None]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        entropy = torch.distributions.Categorical(logits=logits.detach()).entropy().mean()
        share = (clipped < free).float().mean()
        if values is not None:
            return {"loss": loss, "policy/entropy_avg": entropy, "policy/clipfrac_avg": share, "rl/kl_divergence": kl.mean()}
        return {"loss": loss, "entropy": entropy, "clip_ratio/region_mean": share, "kl": kl.mean()}

    def evaluate(self) -> float:
        """Return the mean score of new responses, by the task and not by the reward."""
        prompts = torch.arange(len(PROMPTS)).repeat(32)
        return float(score(prompts, self.policy.sample(prompts)).mean())


def train(exporter: Exporter, trainer: Trainer, steps: int, pause: float) -> None:
    """Train, and log each step."""
    for number in range(steps):
        values = {name: value.detach() for name, value in trainer.step().items()}
        exporter.observe(loss=values.pop("loss"))
        exporter.log(values)
        if number % 20 == 0:
            exporter.log({"eval_reward": trainer.evaluate()})
        time.sleep(pause)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description="Train a small policy.", formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="faults:\n" + "\n".join(f"  {name:9} {text}" for name, text in FAULTS.items()),
    )  # fmt: skip
    parser.add_argument("--method", choices=["grpo", "ppo"], default="grpo")
    parser.add_argument("--fault", choices=[*FAULTS], help="what goes wrong; nothing by default")
    parser.add_argument("--steps", type=int, default=300, help="(default: 300)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps, to watch it (default: 0)")
    parser.add_argument("--port", type=int, help="where metrics and the live page are served; by default nowhere")
    parser.add_argument("--save", help="a file for the run, such as run.json.gz")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    torch.set_num_threads(1)  # more would only wait for each other at this size
    trainer = Trainer(asked.method, asked.fault)
    with start_exporter(trainer.policy, asked.port, every=1) as exporter:
        train(exporter, trainer, asked.steps, asked.pause)
        if asked.save:
            exporter.save(asked.save)


if __name__ == "__main__":
    main()
