"""Run many versions of a program as one execution tree: build and replay it, compare outputs, pack studies."""
