"""LBFGS at the top level of a script: the closure is a global made anew in each epoch."""
import torch
# use: import rearview

torch.manual_seed(0)
x = torch.randn(40, 3)
y = (x**2).sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
calls = 0
for epoch in range(20):

    def closure():
        global calls
        calls += 1
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        # inner: rearview.log("tried", loss.item())
        return loss

    loss = opt.step(closure)
    # outer: rearview.log("calls", calls)
    if epoch == 4:
        break
# after: rearview.log("final", model(x).sum().item())
