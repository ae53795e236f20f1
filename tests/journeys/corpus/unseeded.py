"""Nothing is seeded: uuid, secrets, os.urandom, default_rng(), random, torch all at their own will."""
import os
import random
import secrets
import tempfile
import uuid

import numpy as np
import torch
# use: import rearview

run_id = uuid.uuid4().hex
token = secrets.token_hex(8)
rng = np.random.default_rng()
old = np.random.RandomState()
salt = int.from_bytes(os.urandom(4), "big")
mine = random.Random()
w = torch.randn(6, requires_grad=True)
opt = torch.optim.Adam([w], lr=0.1)
tags = {f"tag{secrets.randbelow(100)}" for _ in range(6)}
for epoch in range(6):
    for _ in range(4):
        x = torch.rand(6) + float(rng.normal()) + old.rand() + mine.random() + np.random.rand()
        loss = (w * x).sum().pow(2)
        opt.zero_grad()
        loss.backward()
        opt.step()
        # inner: rearview.log("loss", loss.item())
    jitter = float(np.random.default_rng().random())
    label = f"{uuid.uuid4()}-{random.randint(0, 9)}-{sorted(tags)[0]}"
    # outer: rearview.log("label", label)
    # outer: rearview.log("jitter", jitter)
# after: rearview.log("ids", run_id + token + str(salt) + ",".join(tags))
