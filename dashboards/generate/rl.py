"""The dashboard "Reinforcement learning": whether the policy learns, beside its gradients."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.generate import layers, logged, training
from dashboards.generate import panels as draw
from dashboards.generate import queries as ask
from dashboards.generate.board import Row, board
from dashboards.generate.panels import CLICKED, Panel, Query, link
from dashboards.generate.queries import highest, of_run
from torch_grad_exporter.rules import THRESHOLDS
from torch_grad_exporter.rules.catalogue import groups
from torch_grad_exporter.rules.reinforcement import FEW_SAMPLES

UID = "torch-grad-rl"
OVERVIEW = link("Training overview", "torch-grad-training", run=CLICKED)
RULES = [rule.name for group in groups() if group.name == "rl" for rule in group.rules]
STATES = {1: ("Pending", "yellow"), 2: ("Firing", "orange")}


def _alerts() -> Panel:
    named = f'alertname=~"{"|".join(RULES)}"'
    states = f"0 * {ask.firing(named, state='pending')} + 1 or 0 * {ask.firing(named)} + 2"
    text = (
        "The alerts about the policy, since when. Pending: the condition holds, not yet for long enough. All other alerts are on "
        "the dashboard Training overview."
    )
    nothing = "No alert, or no alert rules"
    query = Query(f"max by (run, alertname) ({states})", "{{alertname}} {{run}}")
    return draw.timeline("Alerts about the policy", text, query, STATES, nothing).per_page(5).data_links([OVERVIEW])


def _gauge(name: str) -> str:
    """The largest of the ranks, of which usually one logs it."""
    return highest(of_run(f"torch_rl_{name}"), "run")


def _reward() -> Panel:
    mean, deviation = _gauge("reward_mean"), _gauge("reward_std")
    there = highest(f"last_over_time({of_run('torch_rl_reward_mean')}[$__range] @ end())", "run")
    alone = f"and on () count({there}) == 1"
    above, below = Query(f"{mean} + {deviation} {alone}", "± one std"), Query(f"{mean} - {deviation} {alone}", "one std below")
    text = (
        "Mean reward of the samples that the policy is trained on, for a single run within a band of one standard deviation; "
        "dashed: the reward in evaluations. A reward that rises alone is often a reward that the policy games."
    )
    panel = draw.lines(
        "Reward", text, "short", Query(mean, "{{run}}"), Query(_gauge("eval_reward_mean"), "{{run}} evaluation"), above, below,
        nothing="Needs a reward among the logged values",
    )  # fmt: skip
    panel.override_by_query("B", [draw.setting("custom.lineStyle", {"fill": "dash", "dash": [6, 6]})])
    return draw.band(panel, above, below, "green").data_links([OVERVIEW])


def _line(
    title: str, name: str, text: str, nothing: str, *, share: bool = False, unit: str = "short", limit: float | None = None
) -> Panel:
    """A line for each run; `limit`: where an alert begins."""
    query = Query(_gauge(name), "{{run}}")
    panel = draw.lines(title, text, "percentunit" if share else unit, query, nothing=f"Needs {nothing} among the logged values")
    panel = panel.min(0).max(1) if share else panel
    return (panel if limit is None else draw.limit(panel, limit)).data_links([OVERVIEW])


def _divergence() -> Panel:
    text = (
        "Divergence of the policy from the reference policy, in nats per token. A policy that goes far has often found what the "
        "reward overrates. Dashed: KlOutOfRange."
    )
    return _line("KL divergence from the reference", "kl_divergence", text, "a KL divergence", limit=THRESHOLDS["KlOutOfRange"])


def _entropy() -> Panel:
    text = (
        "Entropy of the policy, in nats per token. Where it falls to almost 0 the policy no longer explores: all responses to a "
        "prompt are alike. Dashed: EntropyCollapse."
    )
    return _line("Entropy of the policy", "entropy", text, "an entropy", limit=THRESHOLDS["EntropyCollapse"])


def _policy() -> list[Panel]:
    return [
        _line("Clipped", "clip_ratio", "Share of the tokens whose ratio was clipped: they give no gradient. Dashed: PolicyClipped.",
            "a clip ratio", share=True, limit=THRESHOLDS["PolicyClipped"]),
        _line("Groups without advantage", "zero_advantage_ratio",
            "Share of the groups in which all rewards are equal: they give no gradient. Prompts are then too easy or too hard. "
            "Dashed: ZeroAdvantage.", "the share of groups with equal rewards", share=True, limit=THRESHOLDS["ZeroAdvantage"]),
        _line("Spread of the reward", "reward_std", "Standard deviation of the reward over samples. Without any nothing is learnt.",
            "a deviation of the reward"),
        _line("Length of the responses", "response_length_tokens",
            "Mean number of tokens. A length that grows with the reward may be what is rewarded.", "a length of responses",
            unit="count:tokens"),
        _line("Effective samples", "effective_sample_ratio",
            "Effective number of samples under the importance weights, over their number: low where a few have all the "
            "weight. Dashed: TrainInferenceMismatch.", "importance weights", share=True, limit=FEW_SAMPLES),
        _line("KL divergence of inference from training", "train_inference_kl_divergence",
            "Divergence between the policies that trainer and inference engine compute from the same weights, in nats "
            "per token. Where it grows, responses come from another policy than the one that is trained. Dashed: "
            "TrainInferenceMismatch.", "this divergence", limit=THRESHOLDS["TrainInferenceMismatch"]),
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """The whole dashboard. The first row is one screen of 1440 x 900, 18 rows of the grid."""
    first = [
        *(panel.span(12).height(7) for panel in (_alerts(), layers.troubled().per_page(5))),
        *(panel.span(12).height(5) for panel in (_reward(), training.norm(), _divergence(), _entropy())),
    ]
    content = [
        Row("Does the policy learn?", first),
        Row("Policy", [panel.span(8) for panel in _policy()]),
        Row("Gradients by layer", [layers.norms().span(24).height(14)]),
        Row("Logged values: $value", logged.row()),
    ]
    text = "Whether the policy learns, and what its gradients look like meanwhile."
    return board(UID, "Reinforcement learning", text, content, value=True)
