"""One `while True` loop that trains a tiny transformer, with estimate_loss and cosine warm-up."""
import math
import time

import torch
import torch.nn as nn
from torch.nn import functional as F
# use: import rearview

batch_size, block_size, n_embd, n_head, vocab = 4, 16, 16, 2, 23
max_iters, eval_interval, eval_iters, grad_accum = 24, 6, 2, 2
learning_rate, min_lr, warmup = 1e-2, 1e-3, 4
torch.manual_seed(1337)
data = torch.randint(0, vocab, (600,))
train_data, val_data = data[:500], data[500:]


def get_batch(split):
    source = train_data if split == "train" else val_data
    ix = torch.randint(len(source) - block_size, (batch_size,))
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(n_embd, vocab, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, vocab), targets.view(-1))
        return logits, loss


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / (warmup + 1)
    ratio = (it - warmup) / (max_iters - warmup)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
iter_num = 0
best_val_loss = 1e9
X, Y = get_batch("train")
t0 = time.time()
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
    for micro_step in range(grad_accum):
        logits, loss = model(X, Y)
        loss = loss / grad_accum
        X, Y = get_batch("train")
        loss.backward()
        # inner: rearview.log("micro_loss", loss.item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # outer: rearview.log("gnorm", sum(p.grad.norm() ** 2 for p in model.parameters()).item())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt = t1 - t0
    t0 = t1
    if iter_num % 5 == 0:
        print(f"iter {iter_num}: time {dt * 1000:.2f}ms")
    iter_num += 1
    if iter_num > max_iters:
        break
# after: rearview.log("tied", model.wte.weight.abs().sum().item())
