"""Gradient accumulation under bf16 autocast with a GradScaler (disabled on CPU) and clipping."""
import torch
from torch import nn
# use: import rearview

torch.manual_seed(2)
device = "cpu"
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device, enabled=True, init_scale=4.0, growth_interval=3)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(72, 8), torch.randint(0, 4, (72,))), 6, shuffle=True, drop_last=True
)
accumulate = 3
update = 0
for epoch in range(4):
    optimizer.zero_grad(set_to_none=True)
    for i, (x, y) in enumerate(loader):
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y) / accumulate
        scaler.scale(loss).backward()
        # inner: rearview.log("scaled", loss.item())
        if (i + 1) % accumulate == 0:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            update += 1
            # inner: rearview.log("norm", norm.item())
    # outer: rearview.log("scale", scaler.get_scale())
    # outer: rearview.log("wsum", model[0].weight.sum().item())
print(update)
