"""An RNN language model with hidden state carried (and detached) from batch to batch."""
import torch
import torch.nn as nn
# use: import rearview

torch.manual_seed(1111)
ntokens, bptt, bsz = 17, 7, 4


def batchify(data):
    n = data.size(0) // bsz
    return data[: n * bsz].view(bsz, -1).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(ntokens, 8)
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.2)
        self.decoder = nn.Linear(8, ntokens)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(out).view(-1, ntokens), hidden

    def init_hidden(self):
        weight = next(self.parameters())
        return weight.new_zeros(2, bsz, 8), weight.new_zeros(2, bsz, 8)


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


corpus = batchify(torch.randint(0, ntokens, (240,)))
model, criterion, lr, best = RNNModel(), nn.CrossEntropyLoss(), 5.0, None
hidden = model.init_hidden()


def train():
    global hidden
    model.train()
    total = 0.0
    for batch, i in enumerate(range(0, corpus.size(0) - 1, bptt)):
        x, targets = get_batch(corpus, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(x, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        # inner: rearview.log("cell", hidden[1].norm().item())
        total += loss.item()
    return total


try:
    for epoch in range(1, 6):
        loss = train()
        if best is None or loss < best:
            best = loss
        else:
            lr /= 4.0
        # outer: rearview.log("lr", lr)
        # outer: rearview.log("hidden", hidden[0].sum().item())
except KeyboardInterrupt:
    print("Exiting from training early")
# after: rearview.log("best", best)
