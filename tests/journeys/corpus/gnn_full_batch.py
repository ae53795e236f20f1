"""A two-layer graph convolution on a full sparse graph, with masks; one loop, no batches."""
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.parameter import Parameter
# use: import rearview

np.random.seed(42)
torch.manual_seed(42)
N = 40
edges = np.random.randint(0, N, size=(120, 2))
index = torch.from_numpy(np.concatenate([edges, edges[:, ::-1], np.stack([np.arange(N)] * 2, 1)]).T.copy())
adj = torch.sparse_coo_tensor(index, torch.ones(index.shape[1]), (N, N)).coalesce()
degree = torch.sparse.sum(adj, dim=1).to_dense()
features = torch.randn(N, 8)
labels = torch.randint(0, 3, (N,))
idx_train, idx_val = torch.arange(0, 20), torch.arange(20, 40)


class GraphConvolution(torch.nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = Parameter(torch.empty(n_in, n_out).uniform_(-0.4, 0.4))

    def forward(self, x, adj):
        return torch.spmm(adj, x @ self.weight) / degree[:, None]


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(8, 8), GraphConvolution(8, 3)

    def forward(self, x, adj):
        x = F.dropout(F.relu(self.gc1(x, adj)), 0.5, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)


def train(epoch):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss = F.nll_loss(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    # inner: rearview.log("out", output.abs().max().item())
    model.eval()
    return F.nll_loss(model(features, adj)[idx_val], labels[idx_val]).item()


for epoch in range(30):
    val = train(epoch)
    # outer: rearview.log("val", val)
    # outer: rearview.log("exp_avg", optimizer.state[model.gc1.weight]["exp_avg"].sum().item())
# after: rearview.log("end", model.gc2.weight.sum().item())
