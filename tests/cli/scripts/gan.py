"""Two networks of one class in a function, trained in turn by two optimizers."""

import torch
from record import note


class Net(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(inputs, 8), torch.nn.LeakyReLU(0.2), torch.nn.Linear(8, outputs))

    def forward(self, x):
        return self.layers(x)


def main():
    torch.manual_seed(0)
    netG, netD = Net(4, 2), Net(2, 1)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-2)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-2)
    judge = torch.nn.BCEWithLogitsLoss()
    for step in range(8):
        netD.zero_grad()
        real, fake = netD(torch.randn(16, 2)), netG(torch.randn(16, 4))
        judge(real, torch.ones(16, 1)).backward()
        judge(netD(fake.detach()), torch.zeros(16, 1)).backward()
        note(netD, "Net-2")
        optimizerD.step()
        netG.zero_grad()
        loss = judge(netD(fake), torch.ones(16, 1))
        loss.backward()
        note(netG, "Net")
        optimizerG.step()
        print(step, loss.item())


if __name__ == "__main__":
    main()
