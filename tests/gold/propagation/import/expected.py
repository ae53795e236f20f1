"""Train."""

import os
import torch
import rearview

model = build()
