import torch


def train(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            cost = criterion(model(x), y)
            cost.backward()
            print("loss", cost.item())
            optimizer.step()
            total += cost.item()
        evaluate(model)
