import torch


def fit(net, loader, optimizer, epochs):
    for e in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        evaluate(net)
