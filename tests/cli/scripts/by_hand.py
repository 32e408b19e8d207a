"""No optimizer: the loop updates the data of the parameters itself, as in PyTorch's tutorial on names."""

import torch
from record import note

torch.manual_seed(0)


class RNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.i2h, self.i2o = torch.nn.Linear(4 + 6, 6), torch.nn.Linear(4 + 6, 3)

    def forward(self, inputs, hidden):
        both = torch.cat([inputs, hidden], 1)
        return torch.log_softmax(self.i2o(both), 1), torch.tanh(self.i2h(both))


rnn = RNN()
for step in range(8):
    hidden = torch.zeros(1, 6)
    rnn.zero_grad()
    for letter in torch.randn(3, 1, 4):
        output, hidden = rnn(letter, hidden)
    loss = torch.nn.functional.nll_loss(output, torch.tensor([step % 3]))
    loss.backward()
    note(rnn)
    for parameter in rnn.parameters():
        parameter.data.add_(parameter.grad.data, alpha=-0.05)
    print(step, loss.item())
