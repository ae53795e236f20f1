import torch


def train(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            log(f"norm {float(norm(model)):.3f}")
            total += loss.item()
        evaluate(model)
