"""PPO in the CleanRL style: vector environments, rollout storage, minibatch epochs, annealed rate."""
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical
# use: import rearview


@dataclass
class Args:
    seed: int = 1
    num_envs: int = 2
    num_steps: int = 8
    iterations: int = 5
    update_epochs: int = 2


class Bandit:
    def __init__(self, rng):
        self.rng, self.state = rng, rng.normal(size=3).astype(np.float32)

    def step(self, action):
        reward = float(self.state[action % 3])
        self.state = (0.5 * self.state + self.rng.normal(size=3)).astype(np.float32)
        return self.state, reward, self.rng.random() < 0.1


def layer_init(layer, std=np.sqrt(2)):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(3, 8)), nn.Tanh(), layer_init(nn.Linear(8, 1), 1.0))
        self.actor = nn.Sequential(layer_init(nn.Linear(3, 8)), nn.Tanh(), layer_init(nn.Linear(8, 3), 0.01))

    def act(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


if __name__ == "__main__":
    args = Args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    envs = [Bandit(np.random.default_rng(i)) for i in range(args.num_envs)]
    agent = Agent()
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    obs = torch.zeros((args.num_steps, args.num_envs, 3))
    actions, logprobs, rewards, dones, values = (torch.zeros((args.num_steps, args.num_envs)) for _ in range(5))
    next_obs = torch.tensor(np.stack([e.state for e in envs]))
    next_done = torch.zeros(args.num_envs)
    global_step = 0
    for iteration in range(1, args.iterations + 1):
        optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / args.iterations) * 2.5e-3
        for step in range(0, args.num_steps):
            global_step += args.num_envs
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.act(next_obs)
                values[step] = value.flatten()
            actions[step], logprobs[step] = action, logprob
            results = [e.step(int(a)) for e, a in zip(envs, action)]
            next_obs = torch.tensor(np.stack([r[0] for r in results]))
            rewards[step] = torch.tensor([r[1] for r in results])
            next_done = torch.tensor([float(r[2]) for r in results])
        with torch.no_grad():
            returns, last = torch.zeros_like(rewards), agent.critic(next_obs).flatten()
            for t in reversed(range(args.num_steps)):
                last = rewards[t] + 0.9 * last * (1 - dones[t])
                returns[t] = last
        b_inds = np.arange(args.num_steps * args.num_envs)
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, len(b_inds), 4):
                mb = b_inds[start : start + 4]
                _, newlogprob, entropy, newvalue = agent.act(obs.reshape(-1, 3)[mb], actions.reshape(-1)[mb].long())
                ratio = (newlogprob - logprobs.reshape(-1)[mb]).exp()
                advantage = (returns - values).reshape(-1)[mb]
                loss = -(advantage * ratio.clamp(0.8, 1.2)).mean() + 0.5 * (newvalue.view(-1) - returns.reshape(-1)[mb]).pow(2).mean() - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                # inner: rearview.log("ratio", ratio.max().item())
        # outer: rearview.log("returns", returns.sum().item())
        # outer: rearview.log("global_step", global_step)
    # after: rearview.log("actor", agent.actor[0].weight.sum().item())
