"""Save captured states: decide where, copy the changed buffers, and write them in the background."""
