"""A trainer class for a language model, with accumulation and mixed precision."""

import math
from dataclasses import dataclass

import torch


@dataclass
class Settings:
    lr: float = 6e-4
    warmup: int = 100
    total: int = 5000
    accumulate: int = 4
    clip: float = 1.0
    evaluate_every: int = 250


class Trainer:
    def __init__(self, model, data, settings):
        self.model = model
        self.data = data
        self.settings = settings
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
        self.scaler = torch.amp.GradScaler()
        self.step = 0
        self.best = math.inf

    def rate(self):
        if self.step < self.settings.warmup:
            return self.settings.lr * self.step / self.settings.warmup
        share = (self.step - self.settings.warmup) / (self.settings.total - self.settings.warmup)
        return 0.5 * self.settings.lr * (1 + math.cos(math.pi * share))

    def forward(self, batch):
        tokens, targets = batch
        with torch.autocast("cuda", dtype=torch.float16):
            logits = self.model(tokens)
            flat = logits.view(-1, logits.size(-1))
            loss = torch.nn.functional.cross_entropy(flat, targets.view(-1))
        return loss

    def train_step(self):
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for _ in range(self.settings.accumulate):
            batch = self.data.next("train")
            loss = self.forward(batch) / self.settings.accumulate
            total += loss.item()
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total, norm

    @torch.no_grad()
    def evaluate(self, batches=20):
        self.model.eval()
        losses = []
        for _ in range(batches):
            batch = self.data.next("valid")
            loss = self.forward(batch)
            losses.append(loss.item())
        self.model.train()
        return sum(losses) / len(losses)

    def run(self):
        while self.step < self.settings.total:
            loss, norm = self.train_step()
            if self.step % self.settings.evaluate_every == 0:
                valid = self.evaluate()
                print("step", self.step, "train", loss, "valid", valid)
                if valid < self.best:
                    self.best = valid
                    self.save("best.pt")
        self.save("last.pt")

    def save(self, path):
        state = {"model": self.model.state_dict(), "step": self.step, "best": self.best}
        torch.save(state, path)
