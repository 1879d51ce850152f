"""Imported where processes are forked from: torch, with all that its first nested tensor imports."""

import torch

import arrowcache.torch

assert arrowcache.torch.Loader
torch.nested.nested_tensor_from_jagged(torch.arange(2), torch.tensor([0, 2]))
