"""From a step to stored bytes and back: the data path, one stage a file."""
