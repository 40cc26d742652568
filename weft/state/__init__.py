"""What a rank owns: buckets, slices, the arena, the optimizer's segments."""
