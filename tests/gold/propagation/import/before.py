"""Train."""

import os
import torch

model = build()
