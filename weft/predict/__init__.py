"""How long an op, a collective, an update or a copy takes: measured where it was, estimated where not."""
