"""An engine that decodes through a KV cache, right or with a bug, and every way in which its runs reach llamadiff."""
