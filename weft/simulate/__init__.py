"""What a step will take before it runs: time, memory, and the bound that no schedule of it can beat."""
