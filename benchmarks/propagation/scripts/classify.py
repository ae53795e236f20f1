"""Train an image classifier."""

import argparse
import time

import torch
from project.data import Pictures
from project.nets import build
from torch import nn
from torch.utils.data import DataLoader


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--clip", type=float, default=1.0)
    return parser.parse_args()


def accuracy(output, target):
    best = output.argmax(dim=1)
    right = (best == target).float()
    return right.mean().item()


def evaluate(model, loader, criterion):
    model.eval()
    total, seen, hits = 0.0, 0, 0.0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            loss = criterion(output, labels)
            total += loss.item() * len(images)
            hits += accuracy(output, labels) * len(images)
            seen += len(images)
    return total / seen, hits / seen


def train_epoch(model, loader, criterion, optimizer, clip):
    model.train()
    running = 0.0
    started = time.time()
    for step, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        output = model(images)
        loss = criterion(output, labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        running += loss.item()
        if step % 50 == 0:
            speed = (step + 1) / (time.time() - started)
            print("step", step, "loss", loss.item(), "speed", speed)
    return running / len(loader)


def main():
    args = parse_args()
    torch.manual_seed(0)
    train_set = Pictures("train")
    valid_set = Pictures("valid")
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=args.batch_size)
    model = build("small", classes=train_set.classes)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    best = 0.0
    for epoch in range(args.epochs):
        train_loss = train_epoch(model, train_loader, criterion, optimizer, args.clip)
        valid_loss, valid_acc = evaluate(model, valid_loader, criterion)
        scheduler.step()
        print("epoch", epoch, train_loss, valid_loss, valid_acc)
        if valid_acc > best:
            best = valid_acc
            torch.save(model.state_dict(), "best.pt")
    print("best", best)


if __name__ == "__main__":
    main()
