"""Names that frameworks of reinforcement learning log are shown as one set of metrics."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.support.catalogue import CATALOGUE
from tests.support.scrape import OFF, values
from torch_grad_exporter import start_exporter

OWN = [name.removeprefix("torch_rl_") for name in CATALOGUE if name.startswith("torch_rl_")]

ON = {**OFF, "logged": True, "reinforcement": True}


def shown(*calls: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of reinforcement learning after these calls of `log`, without `torch_rl_`."""
    with start_exporter(torch.nn.Linear(2, 1), None, collectors=ON) as exporter:
        for call in calls:
            exporter.log(call)
        return {
            name.removeprefix("torch_rl_"): value for (name, _), value in values(exporter).items() if name.startswith("torch_rl_")
        }


TRL = {
    "reward": 0.4, "reward_std": 0.2, "kl": 0.01, "entropy": 0.7, "clip_ratio/region_mean": 0.03, "completions/mean_length": 90.0,
    "frac_reward_zero_std": 0.25, "rewards/format/mean": 1.0, "completions/clipped_ratio": 0.5, "clip_ratio/high_max": 0.9,
}  # fmt: skip
FRAMEWORKS = {
    "TRL": (
        [TRL, {"eval_reward": 0.5, "eval_kl": 9.0, "eval_entropy": 9.0}],
        {"reward_mean": 0.4, "reward_std": 0.2, "kl_divergence": 0.01, "entropy": 0.7, "clip_ratio": 0.03,
         "response_length_tokens": 90.0, "zero_advantage_ratio": 0.25, "eval_reward_mean": 0.5},
    ),
    "TRL's PPO": (
        [{"objective/scores": 2.0, "objective/kl": 14.0, "objective/entropy": 60.0, "policy/entropy_avg": 0.5,
          "policy/clipfrac_avg": 0.1, "val/clipfrac_avg": 0.9}],
        {"reward_mean": 2.0, "entropy": 0.5, "clip_ratio": 0.1},
    ),
    "verl": (
        [{"critic/score/mean": 0.6, "critic/rewards/mean": 0.5, "actor/entropy": 0.3, "actor/kl_loss": 9.0, "actor/ppo_kl": 0.001,
          "actor/reward_kl_penalty": 0.02,
          "actor/pg_clipfrac": 0.04, "response_length/mean": 800.0, "response_length/clip_ratio": 0.2,
          "rollout_corr/rollout_is_eff_sample_size": 0.9, "rollout_corr/kl": 0.003,
          "val-core/openai/gsm8k/reward/mean@8": 0.7, "val-core/math/acc/mean@8": 0.5, "val-aux/math/reward/mean@8": 0.0}],
        {"reward_mean": 0.6, "entropy": 0.3, "kl_divergence": 0.02, "clip_ratio": 0.04, "response_length_tokens": 800.0,
         "effective_sample_ratio": 0.9, "train_inference_kl_divergence": 0.003, "eval_reward_mean": 0.6},
    ),
    "OpenRLHF": (
        [{"train/reward": 0.3, "train/kl": 0.05, "train/ppo_clip_ratio": 0.02, "train/vllm_kl": -0.004,
          "train/response_length": 300.0,
          "train/rollout/reward_std": 0.4, "train/entropy_loss": 0.6, "eval/eval_math_pass1": 0.25,
          "eval/eval_math_pass8": 0.75}],
        {"reward_mean": 0.3, "kl_divergence": 0.05, "clip_ratio": 0.02, "train_inference_kl_divergence": -0.004,
         "response_length_tokens": 300.0, "reward_std": 0.4, "eval_reward_mean": 0.25},
    ),
    "prime-rl, the trainer": (
        [{"entropy/all/mean": 0.4, "mismatch_kl/all/mean": 0.002, "is_masked/mean": 0.01, "entropy/math/mean": 0.9}],
        {"entropy": 0.4, "train_inference_kl_divergence": 0.002, "clip_ratio": 0.01},
    ),
    "prime-rl, the orchestrator": (
        [{"train/agg/all/solver/reward/mean": 0.5, "train/agg/all/judge/reward/mean": 0.7, "train/math/all/solver/reward/mean": 9.0,
          "eval/math/all/solver/avg@4": 0.3, "eval/math/effective/solver/avg@4": 0.9}],
        {"reward_mean": 0.6, "eval_reward_mean": 0.3},
    ),
    "a loop of one's own": (
        [{f"rl/{name}": 0.5 for name in OWN}, {"entropy": 3.0, "reward": 3.0}],
        dict.fromkeys(OWN, 0.5),
    ),
    "no reward": ([{"kl": 20.0, "train/entropy": 0.01, "response_length": 3.0, "eval_math_pass1": 0.5, "loss": 1.0}], {}),
    "nothing": ([], {}),
}  # fmt: skip


@pytest.mark.parametrize(("calls", "expected"), FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_names_of_frameworks_become_one_set(calls: list[Mapping[str, float]], expected: Mapping[str, float]) -> None:
    """What a framework logs is shown as what it means; common names only in a run that logs a reward."""
    assert shown(*calls) == pytest.approx(expected)
