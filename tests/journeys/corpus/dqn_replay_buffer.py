"""Q-learning with a replay buffer (deque of tuples), epsilon decay and a target network."""
import copy
import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn as nn
# use: import rearview

Transition = namedtuple("Transition", "s a r s2 done")


class Walk:
    """A corridor: go right to win."""

    def __init__(self, n=6):
        self.n = n

    def reset(self):
        self.at, self.t = self.n // 2, 0
        return self.observe()

    def observe(self):
        v = np.zeros(self.n, dtype=np.float32)
        v[self.at] = 1
        return v

    def step(self, action):
        self.t += 1
        slip = np.random.rand() < 0.1
        self.at += 1 if (action == 1) != slip else -1
        done = self.at <= 0 or self.at >= self.n - 1 or self.t > 20
        self.at = min(max(self.at, 0), self.n - 1)
        return self.observe(), float(self.at == self.n - 1), done


class Buffer:
    def __init__(self, size):
        self.memory = deque(maxlen=size)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, k):
        batch = Transition(*zip(*random.sample(self.memory, k)))
        return (torch.tensor(np.array(x), dtype=torch.float32) for x in batch)

    def __len__(self):
        return len(self.memory)


def main():
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    env, buffer = Walk(), Buffer(40)
    policy = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    target = copy.deepcopy(policy)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-2)
    epsilon, returns = 1.0, []
    for episode in range(12):
        state, done, total = env.reset(), False, 0.0
        while not done:
            if random.random() < epsilon:
                action = random.randrange(2)
            else:
                with torch.no_grad():
                    action = policy(torch.from_numpy(state)).argmax().item()
            state2, reward, done = env.step(action)
            buffer.push(state, action, reward, state2, done)
            state, total = state2, total + reward
            if len(buffer) < 8:
                continue
            s, a, r, s2, d = buffer.sample(8)
            q = policy(s).gather(1, a.long().unsqueeze(1)).squeeze(1)
            with torch.no_grad():
                y = r + 0.9 * target(s2).max(1).values * (1 - d)
            loss = nn.functional.smooth_l1_loss(q, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # inner: rearview.log("td", (q - y).abs().mean().item())
        epsilon *= 0.9
        returns.append(total)
        if episode % 3 == 0:
            target.load_state_dict(policy.state_dict())
        # outer: rearview.log("buffered", sum(t.r for t in buffer.memory))
        # outer: rearview.log("gap", (policy[0].weight - target[0].weight).norm().item())
    print(returns)
    # after: rearview.log("mean_return", float(np.mean(returns)))


main()
