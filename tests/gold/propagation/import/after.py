import torch
import rearview

model = build()
