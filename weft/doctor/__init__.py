"""`weft doctor`: is this machine, and are its peers, fit to train; does a script train as plain PyTorch would."""
