"""What the core never imports: a checkpoint's own code, many cases."""
