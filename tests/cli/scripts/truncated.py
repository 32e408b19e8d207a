"""A recurrent network, back-propagated through pieces of its sequence."""

import torch
from record import note

torch.manual_seed(0)


class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4)
        self.lstm = torch.nn.LSTM(4, 6, batch_first=True)
        self.decoder = torch.nn.Linear(6, 9)

    def forward(self, tokens, state):
        outputs, state = self.lstm(self.embedding(tokens), state)
        return self.decoder(outputs), state


def train(model, optimizer, text):
    state = None
    for piece in text.split(5, dim=1):
        if state is not None:
            state = tuple(part.detach() for part in state)
        logits, state = model(piece[:, :-1], state)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        note(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        print(loss.item())


model = Language()
train(model, torch.optim.Adagrad(model.parameters(), lr=0.1), torch.randint(9, (3, 40)))
