"""Policy gradients on a small control task, all at module level."""

import random

import gymnasium
import numpy as np
import torch
from torch.distributions import Categorical

SEED = 7
GAMMA = 0.99
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)

env = gymnasium.make("CartPole-v1")
policy = torch.nn.Sequential(
    torch.nn.Linear(4, 64),
    torch.nn.Tanh(),
    torch.nn.Linear(64, 2),
)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
history = []


def returns_of(rewards):
    out, running = [], 0.0
    for reward in reversed(rewards):
        running = reward + GAMMA * running
        out.insert(0, running)
    out = torch.tensor(out)
    return (out - out.mean()) / (out.std() + 1e-8)


for episode in range(500):
    state, _ = env.reset(seed=SEED + episode)
    log_probs, rewards = [], []
    done = False
    while not done:
        logits = policy(torch.as_tensor(state, dtype=torch.float32))
        dist = Categorical(logits=logits)
        action = dist.sample()
        state, reward, ended, cut, _ = env.step(action.item())
        log_probs.append(dist.log_prob(action))
        rewards.append(reward)
        done = ended or cut
    returns = returns_of(rewards)
    loss = -(torch.stack(log_probs) * returns).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    score = sum(rewards)
    history.append(score)
    if episode % 25 == 0:
        mean = np.mean(history[-25:])
        print("episode", episode, "mean", mean)
    if len(history) > 100 and np.mean(history[-100:]) > 475:
        print("solved at", episode)
        break

env.close()
