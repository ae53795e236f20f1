"""JAX with optax: a jitted step, pytrees rebound each step, keys split."""
import jax
import jax.numpy as jnp
import optax
# use: import rearview

key = jax.random.PRNGKey(0)
key, kx, kw = jax.random.split(key, 3)
X = jax.random.normal(kx, (64, 4))
Y = jnp.sin(X.sum(1, keepdims=True))
params = {"w1": jax.random.normal(kw, (4, 8)) * 0.5, "b1": jnp.zeros(8), "w2": jnp.zeros((8, 1))}
tx = optax.adam(optax.cosine_decay_schedule(0.05, 40))
opt_state = tx.init(params)


def loss_fn(params, x, y):
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((h @ params["w2"] - y) ** 2)


@jax.jit
def step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


for epoch in range(5):
    key, sub = jax.random.split(key)
    perm = jax.random.permutation(sub, 64)
    for i in range(0, 64, 16):
        batch = perm[i : i + 16]
        params, opt_state, loss = step(params, opt_state, X[batch], Y[batch])
        # inner: rearview.log("loss", float(loss))
    # outer: rearview.log("w1", float(jnp.abs(params["w1"]).sum()))
# after: rearview.log("count", int(opt_state[0].count))
