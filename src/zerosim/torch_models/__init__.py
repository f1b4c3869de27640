"""Any torch.nn.Module as a model: cut into units, measured on shapes alone, and trained through torch's autograd."""
