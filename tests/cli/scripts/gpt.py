"""In the manner of nanoGPT: all at the top, micro-batches, autocast, two groups of AdamW, clipping, a learning rate by hand."""

import contextlib
import math

import torch
from record import note
from torch.nn import functional

torch.manual_seed(1337)
n_embd, block_size, vocab, accumulate = 16, 8, 11, 2


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(n_embd), torch.nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = torch.nn.Linear(n_embd, 3 * n_embd), torch.nn.Linear(n_embd, n_embd)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(n_embd, 4 * n_embd), torch.nn.GELU(), torch.nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        x = x + self.c_proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocab, n_embd), torch.nn.Embedding(block_size, n_embd)
        self.h = torch.nn.ModuleList([Block(), Block()])
        self.lm_head = torch.nn.Linear(n_embd, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


data = torch.randint(vocab, (512,))


def get_batch():
    at = torch.randint(len(data) - block_size, (4,))
    return torch.stack([data[i : i + block_size] for i in at]), torch.stack([data[i + 1 : i + 1 + block_size] for i in at])


model = GPT()
wide = [p for p in model.parameters() if p.dim() >= 2]
groups = [{"params": wide, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
X, Y = get_batch()
for it in range(6):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * it / 6))
    if it % 3 == 0:
        model.eval()
        with torch.no_grad():
            print("val", model(*get_batch())[1].item())
        model.train()
    for _ in range(accumulate):
        with torch.autocast("cpu", torch.bfloat16) if it % 2 else contextlib.nullcontext():
            logits, loss = model(X, Y)
            loss = loss / accumulate
        X, Y = get_batch()
        loss.backward()
    note(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(it, loss.item())
