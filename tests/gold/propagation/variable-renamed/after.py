import torch


def train(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            print("loss", loss.item())
            optimizer.step()
            total += loss.item()
        evaluate(model)
