"""What a script notes of its own gradients, in float64: each round's norm by layer, as `torch_grad_exporter` names them."""

import atexit
import json
import math
import os

ROUNDS: list[dict[str, float]] = []


def note(model, prefix="", *, within_round=False):
    """Notes the gradients as they are now, before clipping. `within_round`: they belong to the round that was noted last."""
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.requires_grad:
            owner, _, own = name.replace("_orig_mod.", "").replace("module.", "").rpartition(".")
            layer = ".".join(part for part in (prefix, owner or own) if part)
            gradient = parameter.grad.detach().to_dense().double()
            squares[layer] = squares.get(layer, 0.0) + float(gradient.square().sum())
    norms = {layer: math.sqrt(value) for layer, value in squares.items()}
    if within_round:
        ROUNDS[-1].update(norms)
    else:
        ROUNDS.append(norms)


def _write():
    path, rank = os.environ.get("RECORD"), os.environ.get("RANK", "0")
    if path:
        with open(path if rank == "0" else f"{path}{rank}", "w", encoding="utf-8") as file:
            json.dump(ROUNDS, file)


atexit.register(_write)
