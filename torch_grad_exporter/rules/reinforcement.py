"""Rules on reinforcement learning, by the values that its frameworks log."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.reinforcement import (
    RL_CLIP_RATIO,
    RL_EFFECTIVE_SAMPLE_RATIO,
    RL_ENTROPY,
    RL_EVAL_REWARD_MEAN,
    RL_KL_DIVERGENCE,
    RL_REWARD_MEAN,
    RL_TRAIN_INFERENCE_KL,
    RL_ZERO_ADVANTAGE_RATIO,
)
from torch_grad_exporter.rules.context import BUSY, HOUR, MINUTES_10, THRESHOLDS, RuleContext
from torch_grad_exporter.rules.declaration import Alert, Finding, rule

# KlOutOfRange: an estimate may be this far below zero. RewardWithoutEval: by which share of itself the reward has risen.
# TrainInferenceMismatch: the share of effective samples that is too small.
BELOW_ZERO, RISEN, FEW_SAMPLES = -0.1, 0.05, 0.3


@rule(
    "EntropyCollapse",
    BUSY,
    Alert(
        "warning",
        """
        max by (run) (max_over_time(torch_rl_entropy[10m])) < 0.05 >= 0
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="10m",
        summary="The policy of run {{ $labels.run }} hardly explores any more.",
        description="For 20 minutes the entropy of the policy has been below 0.05 nats per token, now {{ $value | humanize }}.",
    ),
    remembers={RL_ENTROPY: MINUTES_10},
    by_samples=True,
    needs=(RL_ENTROPY,),
    first_steps=(
        "Look whether the evaluation still rises. If not, go back to a checkpoint from before the fall, and raise the upper clip "
        "range, the entropy bonus or the KL coefficient, or lower the learning rate."
    ),
    why=(
        "At 0.05 nats a token nearly all tokens are certain: samples of a group are alike, and what is left to learn from is "
        "little. Studies of reasoning models see rewards stop rising as the entropy comes near zero (arXiv 2505.22617)."
    ),
    note=(
        "Cannot fire where no entropy per token is logged, as by OpenRLHF; there log it as rl/entropy. A negative one is that of a "
        "continuous distribution, and not judged."
    ),
)
def entropy_collapse(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if no recent batch had an entropy worth mentioning."""
    highest = context.highest(RL_ENTROPY, MINUTES_10).largest()
    if highest is not None and 0 <= highest < THRESHOLDS["EntropyCollapse"]:
        text = f"The entropy of the policy was at most {highest:.3g} nats per token {context.within(MINUTES_10)}."
        yield Finding("warning", text, value=highest)


@rule(
    "KlOutOfRange",
    BUSY,
    Alert(
        "warning",
        """
        (
          max by (run) (avg_over_time(torch_rl_kl_divergence[10m])) > 1
          or min by (run) (avg_over_time(torch_rl_kl_divergence[10m])) < -0.1
        )
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="10m",
        summary="The policy of run {{ $labels.run }} has left its reference, or its KL is not one.",
        description="Over 10 minutes the KL divergence from the reference policy was {{ $value | humanize }} nats per token.",
    ),
    remembers={RL_KL_DIVERGENCE: MINUTES_10},
    by_samples=True,
    needs=(RL_KL_DIVERGENCE,),
    first_steps=(
        "Above 1: read some responses; if they are odd but rewarded, mend the reward, and raise the KL coefficient. Below 0: "
        "compare sampling with training: temperature, top-k, padding, the tokens that end a response."
    ),
    why=(
        "At 1 nat a token the policy's own responses are e times less likely, token by token, for the reference: it writes another "
        "language. A mean below zero is impossible but for noise: responses were not sampled from the policy that is trained."
    ),
    note="TRL's PPO logs a sum over the response, objective/kl, which is not judged.",
)
def kl_out_of_range(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if the mean divergence is too large, or negative."""
    divergence = context.mean(RL_KL_DIVERGENCE, MINUTES_10).largest()
    if divergence is not None and (divergence > THRESHOLDS["KlOutOfRange"] or divergence < BELOW_ZERO):
        text = f"The KL divergence from the reference was {divergence:.3g} nats per token {context.within(MINUTES_10)}."
        yield Finding("warning", text, value=divergence)


@rule(
    "ZeroAdvantage",
    BUSY,
    Alert(
        "warning",
        """
        max by (run) (avg_over_time(torch_rl_zero_advantage_ratio[10m])) > 0.8
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="10m",
        summary="Most groups of run {{ $labels.run }} give no gradient.",
        description="In {{ $value | humanizePercentage }} of the groups all rewards were equal, over 10 minutes.",
    ),
    remembers={RL_ZERO_ADVANTAGE_RATIO: MINUTES_10},
    by_samples=True,
    needs=(RL_ZERO_ADVANTAGE_RATIO,),
    first_steps=(
        "Look at the mean reward: near its end prompts are too easy, or the policy has collapsed; near its beginning they are too "
        "hard, or the reward function fails. Choose other prompts, sample more responses a prompt, or leave such groups out."
    ),
    why="With one group in five left, a batch costs five times its price, and its gradient is that of a fifth of its size.",
    note="Only for methods that compare the responses to one prompt, such as GRPO and RLOO.",
)
def zero_advantage(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if nearly all groups had equal rewards."""
    ratio = context.mean(RL_ZERO_ADVANTAGE_RATIO, MINUTES_10).largest()
    if ratio is not None and ratio > THRESHOLDS["ZeroAdvantage"]:
        yield Finding("warning", f"In {ratio:.0%} of the groups all rewards were equal {context.within(MINUTES_10)}.", value=ratio)


@rule(
    "RewardWithoutEval",
    BUSY,
    Alert(
        "warning",
        """
        max by (run) (torch_rl_eval_reward_mean)
        < max by (run) (max_over_time(torch_rl_eval_reward_mean[1h]))
          - 0.1 * abs(max by (run) (max_over_time(torch_rl_eval_reward_mean[1h])))
        and on (run)
          max by (run) (avg_over_time(torch_rl_reward_mean[10m]))
          > max by (run) (avg_over_time(torch_rl_reward_mean[1h]))
            + 0.05 * abs(max by (run) (avg_over_time(torch_rl_reward_mean[1h])))
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="15m",
        keep_firing_for="30m",
        summary="The reward of run {{ $labels.run }} rises, and its evaluation falls.",
        description="The evaluation is at {{ $value | humanize }}, a tenth below the best of the hour, while the reward rises.",
    ),
    remembers=dict.fromkeys((RL_REWARD_MEAN, RL_EVAL_REWARD_MEAN), HOUR),
    by_samples=True,
    needs=(RL_EVAL_REWARD_MEAN,),
    first_steps=(
        "Read the responses with the highest rewards: they mostly show the flaw of the reward function. Stop, mend it, and go "
        "back to the checkpoint with the best evaluation."
    ),
    why=(
        "A tenth: evaluations of a few hundred prompts scatter by a twentieth. 5 % above the mean of the hour: a reward that is "
        "flat does not count. For 15m: an evaluation at the beginning of a run, with an accuracy near zero, may fall by chance."
    ),
    note="Of evaluations that are further apart than an hour, one is compared with the one before it, for the hour after it.",
)
def reward_without_eval(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if the evaluation is worse than it was, and the reward better."""
    evaluated, best = context.values.table(RL_EVAL_REWARD_MEAN).largest(), context.highest(RL_EVAL_REWARD_MEAN, HOUR).largest()
    reward, usual = (context.mean(RL_REWARD_MEAN, seconds).largest() for seconds in (MINUTES_10, HOUR))
    if evaluated is None or best is None or reward is None or usual is None:
        return
    if evaluated < best - THRESHOLDS["RewardWithoutEval"] * abs(best) and reward > usual + RISEN * abs(usual):
        text = f"The evaluation fell from {best:.3g} to {evaluated:.3g}, and the reward rose from {usual:.3g} to {reward:.3g}."
        yield Finding("warning", text, value=evaluated)


@rule(
    "PolicyClipped",
    BUSY,
    Alert(
        "warning",
        """
        max by (run) (avg_over_time(torch_rl_clip_ratio[10m])) > 0.3
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="10m",
        summary="Much of the policy's gradient of run {{ $labels.run }} is clipped.",
        description="The ratio of {{ $value | humanizePercentage }} of the tokens was clipped, over 10 minutes.",
    ),
    remembers={RL_CLIP_RATIO: MINUTES_10},
    by_samples=True,
    needs=(RL_CLIP_RATIO,),
    first_steps=(
        "Lower the learning rate or the number of passes over a batch, or sample more often: the policy moves too far from the one "
        "that wrote the responses. With an inference engine of its own also look at TrainInferenceMismatch."
    ),
    why=(
        "Clipping is meant for the rare token. Where it holds back a third, a step is no longer that of the objective: those "
        "tokens give no gradient."
    ),
    note="Cannot fire where each batch is used once by the policy that wrote it: all ratios are then 1.",
)
def policy_clipped(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if many ratios were clipped."""
    ratio = context.mean(RL_CLIP_RATIO, MINUTES_10).largest()
    if ratio is not None and ratio > THRESHOLDS["PolicyClipped"]:
        yield Finding("warning", f"The ratio of {ratio:.0%} of the tokens was clipped {context.within(MINUTES_10)}.", value=ratio)


@rule(
    "TrainInferenceMismatch",
    BUSY,
    Alert(
        "warning",
        """
        (
          max by (run) (abs(avg_over_time(torch_rl_train_inference_kl_divergence[10m]))) > 0.1
          or min by (run) (avg_over_time(torch_rl_effective_sample_ratio[10m])) < 0.3
        )
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="10m",
        summary="The engine that samples for run {{ $labels.run }} has another policy than the trainer.",
        description=(
            "Over 10 minutes their KL divergence was above 0.1 nats per token, or the effective samples below 30 %: "
            "{{ $value | humanize }}."
        ),
    ),
    remembers=dict.fromkeys((RL_TRAIN_INFERENCE_KL, RL_EFFECTIVE_SAMPLE_RATIO), MINUTES_10),
    by_samples=True,
    needs=(RL_TRAIN_INFERENCE_KL, RL_EFFECTIVE_SAMPLE_RATIO),
    first_steps=(
        "Check that the engine has the trainer's newest weights, its precision and its sampling parameters. Sample more often, or "
        "correct by importance weights. A growing mismatch comes before a collapse."
    ),
    why="The limits at which verl's documentation on rollout correction tells to intervene: 0.1 nats, and 0.3 of the samples.",
    note="TRL logs the difference of log probabilities, sampling/..., which is shown as a logged value and not judged.",
)
def train_inference_mismatch(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if the two policies differ, or importance weights leave few samples."""
    divergence = context.mean(RL_TRAIN_INFERENCE_KL, MINUTES_10).largest()
    samples = context.mean(RL_EFFECTIVE_SAMPLE_RATIO, MINUTES_10).largest()
    if divergence is not None and abs(divergence) > THRESHOLDS["TrainInferenceMismatch"]:
        text = f"The engine's policy was {divergence:.3g} nats per token from the trainer's {context.within(MINUTES_10)}."
        yield Finding("warning", text, value=divergence)
    elif samples is not None and samples < FEW_SAMPLES:
        yield Finding("warning", f"The effective samples were {samples:.0%} of all {context.within(MINUTES_10)}.", value=samples)
