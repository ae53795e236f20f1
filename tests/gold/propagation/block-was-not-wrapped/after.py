import torch


def train(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                out = model(x)
                loss = criterion(out, y)
                print("loss", loss)
            loss.backward()
            optimizer.step()
            total += loss.item()
        evaluate(model)
