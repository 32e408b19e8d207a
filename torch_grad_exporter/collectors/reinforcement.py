"""Collector `reinforcement`: what reinforcement learning logs under each framework's own names, as one set of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, Spec, scalar
from torch_grad_exporter.store.logged_values import NAMES, LoggedValues

LEARNING = Section("Reinforcement learning")


def _gauge(name: str, help_: str) -> Spec:
    return LEARNING.gauge(f"torch_rl_{name}", f"{help_}; a loop of your own logs it as rl/{name}.", opt_in="log")


RL_REWARD_MEAN = _gauge("reward_mean", "Mean reward of the last batch of responses")
RL_REWARD_STD = _gauge("reward_std", "Standard deviation of the rewards of the last batch")
RL_EVAL_REWARD_MEAN = _gauge("eval_reward_mean", "Mean reward or accuracy of the last evaluation, over its datasets")
RL_KL_DIVERGENCE = _gauge("kl_divergence", "KL divergence of the policy from the reference policy in nats per token")
RL_ENTROPY = _gauge("entropy", "Entropy of the policy in nats per token")
RL_CLIP_RATIO = _gauge("clip_ratio", "Share of tokens of which the policy's ratio was clipped")
RL_RESPONSE_LENGTH = _gauge("response_length_tokens", "Mean length of the responses")
RL_ZERO_ADVANTAGE_RATIO = _gauge(
    "zero_advantage_ratio", "Share of groups in which all rewards are equal, so that they give no gradient"
)
RL_EFFECTIVE_SAMPLE_RATIO = _gauge("effective_sample_ratio", "Effective sample size of the importance weights over the samples")
RL_TRAIN_INFERENCE_KL = _gauge(
    "train_inference_kl_divergence", "KL divergence of the inference engine's policy from the trainer's in nats per token"
)

# Of each metric the patterns of names, of which the first that a run logs counts; if several names match it, their mean. Names without a slash may mean anything, as `kl` does for a variational autoencoder: they count in runs that
# log a reward. Left out is what has another unit or sign: TRL's `objective/kl` and `objective/entropy` are sums over a response,
# verl's `actor/kl_loss` is one over mini-batches, and `entropy_loss` is negative in some libraries, though not in OpenRLHF.
LOGGED_AS: Mapping[Spec, tuple[str, ...]] = {
    RL_REWARD_MEAN: (
        "reward",  # TRL: GRPO, RLOO; OpenRLHF
        "objective/scores",  # TRL: PPO
        "critic/score/mean",  # verl
        "rollout/reward_mean",  # OpenRLHF
        "reward/all/mean",  # prime-rl
        "agg/all/[^/]+/reward/mean",
    ),
    RL_REWARD_STD: ("reward_std", "rollout/reward_std", "reward/all/std", "agg/all/[^/]+/reward/std"),
    RL_EVAL_REWARD_MEAN: (
        "eval_reward",  # TRL
        "eval/reward",
        "val-core/.+/mean@[0-9]+",  # verl
        "(eval/)?eval_.+_pass1",  # OpenRLHF
        "eval/[^/]+/all/.+/avg@[0-9]+",  # prime-rl
        "eval/[^/]+/avg@[0-9]+",
    ),
    RL_KL_DIVERGENCE: ("kl", "actor/reward_kl_penalty"),
    RL_ENTROPY: ("entropy", "policy/entropy_avg", "actor/entropy", "entropy/all/mean"),
    RL_CLIP_RATIO: (
        "clip_ratio/region_mean",
        "clip_ratio",
        "policy/clipfrac_avg",
        "actor/pg_clipfrac",
        "ppo_clip_ratio",
        "is_masked/all/mean",
        "is_masked/mean",
    ),
    RL_RESPONSE_LENGTH: (
        "completions/mean_length",
        "response_length/mean",
        "response_length",
        "rollout/response_length_mean",
        "seq_len/all/mean",
        "agg/all/[^/]+/num_output_tokens/mean",
    ),
    RL_ZERO_ADVANTAGE_RATIO: ("frac_reward_zero_std",),
    RL_EFFECTIVE_SAMPLE_RATIO: ("rollout_corr/rollout_is_eff_sample_size",),
    RL_TRAIN_INFERENCE_KL: ("rollout_corr/kl", "vllm_kl", "mismatch_kl/all/mean"),
}


# By pattern the metric, and the place of the pattern among its own. Frameworks and trackers put `train/` before some names.
_PATTERNS = [
    (re.compile(f"(?:train/)?(?:{pattern})"), (spec, place))
    for spec, patterns in LOGGED_AS.items()
    for place, pattern in enumerate((spec.name.replace("torch_rl_", "rl/", 1), *patterns))
]


@lru_cache(maxsize=4 * NAMES)
def _meaning(name: str) -> tuple[Spec, int] | None:
    return next((meaning for pattern, meaning in _PATTERNS if pattern.fullmatch(name)), None)


class ReinforcementCollector:
    """Families of what is known by its name, none in a run that logs no such name."""

    def __init__(self, logged: LoggedValues) -> None:
        self._logged = logged

    def collect(self) -> Iterator[Family]:
        """Yield the families of now."""
        if not self._logged.calls:
            return
        known = [(name, *meaning, value) for name, (value, _) in self._logged.snapshot()[0].items() if (meaning := _meaning(name))]
        if not any(spec is RL_REWARD_MEAN for _, spec, _, _ in known):  # then names without a slash may mean anything
            known = [entry for entry in known if "/" in entry[0].removeprefix("train/")]
        for spec in LOGGED_AS:
            first = min((place for _, of, place, _ in known if of is spec), default=None)
            values = [value for _, of, place, value in known if of is spec and place == first]
            if values:
                yield scalar(spec, sum(values) / len(values))


COLLECTOR = Declaration("reinforcement", (LEARNING,), lambda context: ReinforcementCollector(context.logged), place=23)
