def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        print "step"
        loss.backward()
        print("loss", loss.item())
        optimizer.step()
