"""The rule on models that are trained against each other."""

from __future__ import annotations

from torch_grad_exporter.rules.declaration import Alert, server_rule

MODELS_OUT_OF_BALANCE = server_rule(
    "ModelsOutOfBalance",
    Alert(
        "warning",
        """
        max by (run) (run_optimizer:torch_grad_global_norm:change2h)
        / (min by (run) (clamp_min(run_optimizer:torch_grad_global_norm:change2h, 1e-9)) > 0)
        > 10
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="15m",
        summary="The models of run {{ $labels.run }} are out of balance.",
        description=(
            "The ratio of their optimizers' gradient norms is {{ $value | humanize }} times away from what it was in the two hours "
            "before."
        ),
    ),
    first_steps=(
        "Compare the two norms and losses: the model whose gradient has shrunk has won, or has nothing left to learn from. Train "
        "the winner less often or with a lower learning rate. exporter.watch on the generator's samples shows on which side the "
        "gradient is lost."
    ),
    why=(
        "What ratio is right differs from one pair of models to the next, so each is compared with its own past. 10: of four small "
        "GANs on points of a circle, two healthy ones stayed within a factor of 1.4, and two whose discriminator could tell all "
        "samples apart went beyond 100. For 15m: as long again as the median looks back. 1e-9 stands for a gradient of 0."
    ),
    note=(
        "Only where start_exporter was given several models, each with an optimizer of its own; with several optimizers for one of "
        "the models, all are compared. Cannot fire in the first two hours, nor where the global norm is not known, as under FSDP2 "
        "without observe(grad_norm=). What lasts for hours becomes the new past, and the alert ends."
    ),
)
