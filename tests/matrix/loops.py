"""Loops: how backwards and steps follow each other."""

from __future__ import annotations

import torch
from models import Perceptron, batch, sgd

from matrix.harness import Naive, Run, regime


@regime(set_to_none=[True, False])
def plain(run: Run, set_to_none: bool) -> None:
    """One forward, one backward, one step."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for _ in range(25):
            optimizer.zero_grad(set_to_none=set_to_none)
            run.backward(model(batch()).square().mean())
            run.step(optimizer)
            run.check()


@regime(set_to_none=[True, False])
def accumulation(run: Run, set_to_none: bool) -> None:
    """Three backwards to a step are one sample, of the accumulated gradient."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for _ in range(6):
            for _ in range(3):
                run.backward(model(batch()).square().mean())
            run.step(optimizer)
            optimizer.zero_grad(set_to_none=set_to_none)
            run.check()


@regime(Naive.STEP)
def clip_grad_norm(run: Run) -> None:
    """Norms are those before `clip_grad_norm_`; the coefficient is its factor."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(12):
            optimizer.zero_grad()
            run.backward(model(batch()).square().mean() * (10.0 if step % 3 else 0.001))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            run.step(optimizer)
            run.check()


@regime()
def gan(run: Run) -> None:
    """A generator and a discriminator in turn; of each round only what the stepping optimizer owns is shown."""
    generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    discriminator = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.01)
    models = {"generator": generator, "discriminator": discriminator}
    with run.watching(models, {"SGD": of_generator, "Adam": of_discriminator}):
        for _ in range(4):
            of_discriminator.zero_grad()
            fake = generator(torch.randn(5, 3)).detach()
            loss = discriminator(fake).mean() - discriminator(torch.randn(5, 4)).mean()
            run.backward(loss, unused=[f"generator.{n}" for n, _ in generator.named_parameters()])
            run.step(of_discriminator, "Adam")
            of_generator.zero_grad()
            run.backward(-discriminator(generator(torch.randn(5, 3))).mean())
            run.step(of_generator, "SGD")
    run.check()  # after `close`, since the last round is open until the next backward
