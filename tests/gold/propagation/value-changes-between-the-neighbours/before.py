import torch


def train(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss = loss / accumulate
            loss.backward()
            optimizer.step()
            total += loss.item()
        evaluate(model)
