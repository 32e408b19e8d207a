"""Several models, several optimizers: of each round only what the stepping optimizers own is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tests.matrix.harness import CUMULATIVE, UNSEEN, Run, regime
from tests.matrix.loops import written_by_hand
from tests.support.models import Perceptron, batch, sgd


def all_of(models: Mapping[str, torch.nn.Module], *names: str) -> list[str]:
    """The full names of all parameters of the models of these names."""
    return [f"{name}.{n}" for name in names for n, _ in models[name].named_parameters()]


# Optimizers that share a model


@regime(named=[False, True])
def optimizers_that_share_a_backward(run: Run, named: bool) -> None:
    """With weights in one optimizer and biases in another each shows the norm of what it owns."""
    model = Perceptron()
    weights = torch.optim.SGD([model.first.weight, model.second.weight], lr=0.01)
    biases = torch.optim.AdamW([model.first.bias, model.second.bias], lr=0.01)
    optimizers = {"weights": weights, "biases": biases} if named else {"SGD": weights, "AdamW": biases}
    # a found optimizer's part of the first round is shown only once it has stepped
    for _ in run.rounds(model, 5, optimizers, named=named, since=1):
        run.backward(model(batch()).square().mean())


@regime()
def optimizers_that_share_a_backward_and_clip(run: Run) -> None:
    """Three optimizers of one kind, all clipped together, are distinguished and have the same coefficient."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    optimizers = {name: torch.optim.SGD(model[i].parameters(), lr=0.05) for name, i in (("a", 0), ("b", 2), ("c", 3))}
    for _ in run.rounds(model, 5, optimizers, named=True):
        run.backward(model(batch()).square().mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@regime()
def an_optimizer_that_steps_every_other_time(run: Run) -> None:
    """Of two optimizers that share a backward one steps each time, the other after two: each shows what it steps with."""
    model = Perceptron()
    often, rarely = sgd(model.second), torch.optim.AdamW(model.first.parameters(), lr=0.01)
    named = {"often": often, "rarely": rarely}
    with run.watching(model, named, optimizers=named):
        for step in range(8):
            often.zero_grad()
            run.backward(model(batch()).square().mean())
            run.step(often, "often")
            if step % 2:
                run.step(rarely, "rarely")
                rarely.zero_grad()
    run.check()  # after `close`: whether the second still steps on the same backward shows at the next one


@regime(alive=[True, False])
def another_optimizer_from_then_on(run: Run, alive: bool) -> None:
    """Adam first and SGD from the fifth step on, over the same parameters; the norm is that of who steps."""
    model = Perceptron()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer: torch.optim.Optimizer = adam
    with run.watching(model, {"Adam": adam, "SGD": sgd(model)}):
        for step in range(10):
            if step == 4:
                optimizer = sgd(model)
                if not alive:
                    del adam
            optimizer.zero_grad()
            run.backward(model(batch()).square().mean())
            run.step(optimizer, type(optimizer).__name__)
        run.check()


@regime(named=[False, True])
def optimizers_by_turns_on_the_same_parameters(run: Run, named: bool) -> None:
    """Two optimizers that own the same parameters and step by turns each show the gradients that they stepped with."""
    model = Perceptron()
    optimizers = {"Adam": torch.optim.Adam(model.parameters(), lr=0.01), "SGD": sgd(model)}
    with run.watching(model, optimizers, **({"optimizers": optimizers} if named else {})):
        for step in range(8):
            name = "SGD" if step % 2 else "Adam"
            optimizers[name].zero_grad()
            run.backward(model(batch()).square().mean())
            run.step(optimizers[name], name)
            if step:
                run.check()


@regime()
def by_hand_with_two_optimizers(run: Run) -> None:
    """Gradients that the loop writes itself, for two optimizers that share each layer: a layer's norm is of both parts."""
    model = Perceptron()
    parameters = list(model.parameters())
    weights, biases = torch.optim.SGD(parameters[::2], lr=0.01), torch.optim.AdamW(parameters[1::2], lr=0.01)
    named = {"weights": weights, "biases": biases}
    # by then two rungs have seen steps without a backward, and so `optimizer` is reached
    for _ in run.rounds(model, 8, named, named=True, clear=False, since=5, without=[*UNSEEN, *CUMULATIVE]):
        written_by_hand(run, model, model(batch()).square().mean())


# Models that are trained side by side, or one after the other


@regime()
def models_with_a_backward_each(run: Run) -> None:
    """Two models with a loss, a backward and an optimizer each; both steps follow both backwards."""
    models = {"left": Perceptron(), "right": Perceptron()}
    optimizers = {name: sgd(model) for name, model in models.items()}
    for _ in run.rounds(models, 5, optimizers, named=True):
        run.backward(models["left"](batch()).square().mean(), unused=all_of(models, "right"))
        run.backward(models["right"](batch()).square().mean())


# Generative adversarial networks


class Gan(torch.nn.Module):
    """A generator and a discriminator with an optimizer each. `whole`: how they are found and called.

    `mapping`: two models; `root`: one model that holds both, whose forward takes the part; `parts`: one whose parts are called.
    """

    def __init__(self, run: Run, whole: str = "mapping", names: Iterable[str] = ("SGD", "Adam")) -> None:
        super().__init__()
        self.generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        self.discriminator = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        self.parts = {"generator": self.generator, "discriminator": self.discriminator}
        self.watched = self.parts if whole == "mapping" else self
        self.whole = whole
        self.run = run
        self.of_generator, self.of_discriminator = names
        self.optimizers = {
            self.of_generator: torch.optim.SGD(self.generator.parameters(), lr=0.01),
            self.of_discriminator: torch.optim.Adam(self.discriminator.parameters(), lr=0.01),
        }

    def forward(self, part: str, x: torch.Tensor) -> torch.Tensor:
        return self.parts[part](x)

    def called(self, part: str, x: torch.Tensor) -> torch.Tensor:
        """The part of that name, called as the models are to be."""
        return self(part, x) if self.whole == "root" else self.parts[part](x)

    def fake(self) -> torch.Tensor:
        return self.called("generator", torch.randn(5, 3))

    def judged(self, x: torch.Tensor) -> torch.Tensor:
        return self.called("discriminator", x).mean()

    def train_discriminator(self, *, backwards: int = 1, clip: bool = False) -> None:
        """A round of the discriminator, with one backward or with one each of fake and real."""
        self.optimizers[self.of_discriminator].zero_grad()
        losses = self.judged(self.fake().detach()), -self.judged(torch.randn(5, 4))
        for loss in losses if backwards == 2 else [losses[0] + losses[1]]:
            self.run.backward(loss, unused=all_of(self.parts, "generator"))
        if clip:
            torch.nn.utils.clip_grad_norm_(self.discriminator.parameters(), 0.05)
        self.run.step(self.optimizers[self.of_discriminator], self.of_discriminator)

    def train_generator(self) -> None:
        """A round of the generator, whose backward leaves gradients in the discriminator, too."""
        self.optimizers[self.of_generator].zero_grad()
        self.run.backward(-self.judged(self.fake()))
        self.run.step(self.optimizers[self.of_generator], self.of_generator)


@regime(critics=[1, 3])
def gan_with_named_optimizers(run: Run, critics: int) -> None:
    """With optimizers that were named at the start each round of the discriminator can be checked at once."""
    gan = Gan(run, names=("of_generator", "of_discriminator"))
    with run.watching(gan.watched, gan.optimizers, optimizers=gan.optimizers):
        for iteration in range(4):
            for _ in range(critics):
                gan.train_discriminator()
                if iteration:  # before, one optimizer has no sample yet, and the other's has no label
                    run.check()
            gan.train_generator()
    run.check()


@regime(clip=[False, True])
def gan_with_two_backwards(run: Run, clip: bool) -> None:
    """A discriminator that accumulates from fake and real in two backwards, and alone may be clipped, has one sample of both."""
    gan = Gan(run)
    with run.watching(gan.watched, gan.optimizers):
        for _ in range(5):
            gan.train_discriminator(backwards=2, clip=clip)
            gan.train_generator()
    run.check()


@regime()
def gan_that_begins_with_its_generator(run: Run) -> None:
    """Before the discriminator's optimizer has stepped, the generator's norm is of the generator alone."""
    gan = Gan(run)
    with run.watching(gan.watched, gan.optimizers):
        for _ in range(3):
            gan.train_generator()
        for _ in range(3):
            gan.train_discriminator()
            gan.train_generator()
    run.check()


@regime(named=[False, True])
def gan_whose_root_is_never_called(run: Run, named: bool) -> None:
    """Generator and discriminator as parts of one model that is never called: seen from the rung `parameter` on."""
    gan = Gan(run, "parts")
    with run.watching(gan, gan.optimizers, **({"optimizers": gan.optimizers} if named else {})):
        for iteration in range(8):
            gan.train_discriminator(backwards=2)
            # The first samples show that there are backwards which do not run through the root; those before are lost.
            if iteration > 3:
                run.check(without=["torch_train_", *CUMULATIVE])
            gan.train_generator()
