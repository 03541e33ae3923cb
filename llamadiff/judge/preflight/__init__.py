"""What must agree before any layer is looked at: tokens, batches, shapes, weights."""
