"""A language model in one long loop, as single-file trainers have it."""

import time

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(2)
tokens = torch.randint(500, (20_000,))
embed = nn.Embedding(500, 96)
body = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(96, 4, 256, batch_first=True), 2, enable_nested_tensor=False
)
head = nn.Linear(96, 500)
params = [*embed.parameters(), *body.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(params)
step = 0
t0 = time.time()
while True:
    if step == 300:
        break
    at = torch.randint(len(tokens) - 65, (8,))
    block = torch.stack([tokens[i : i + 65] for i in at])
    logits = head(body(embed(block[:, :-1])))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    # OUTER loss.item()
    step += 1
