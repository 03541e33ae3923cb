"""Is the file right: a model's weights alone, against another file, a checkpoint, or a dump of them."""
